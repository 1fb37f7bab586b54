"""Control tokens that somebody writes stay text, and all other text is encoded as ever."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel
from transformers import AddedToken, PreTrainedTokenizerFast

from kvpolicies.errors import UserError
from kvpolicies.models import tokens
from kvpolicies.models.form import Form
from kvpolicies.models.plain import PlainText
from kvpolicies.models.prompts import Prompts, user
from tests.support.vocabularies import CHAT, of_bytes, smollm2

LETTERS = "abcdeinstu<>|/_ ▁s"


def fast(inner: Tokenizer, special: list[str], others: list[str]) -> Any:
    inner.add_special_tokens(special)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=special[0])
    made.add_tokens([AddedToken(token, normalized=False) for token in others])
    made.chat_template = CHAT
    return made


def unigram() -> Any:
    """As XGLM's: control tokens are pieces, compatible forms are one, spaces are marked."""
    pieces = ["<s>", "</s>", "<unk>", *dict.fromkeys(LETTERS), "▁a", "in", "st", "s>"]
    inner = Tokenizer(Unigram([(p, -len(p) / 9) for p in pieces], 2, False))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return fast(inner, ["<s>", "</s>", "<unk>"], ["<|turn|>", "<|end|>"])


def merging() -> Any:
    """As Llama 2's: a space before each stretch, bytes, and merges that end in a control token."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)),
             *dict.fromkeys(LETTERS), "s>", "in", "▁in", "▁a", "<s"]  # fmt: skip
    merges = [("s", ">"), ("<", "s>"), ("<s", ">"), ("i", "n"), ("▁", "in"), ("▁", "a"), ("<", "s")]
    numbers = {piece: i for i, piece in enumerate(vocab)}
    inner = Tokenizer(BPE(numbers, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fast(inner, ["<s>", "</s>", "<unk>"], ["<|turn|>", "<|end|>"])


def words() -> Any:
    """As the embedded model's: a control token is a word like any other."""
    inner = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "a": 2, "in": 3}, unk_token="<pad>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast(inner, ["<s>"], ["<|turn|>", "<|end|>"])


MAKERS = {
    "bytes": lambda: of_bytes(CHAT), "unmarked": lambda: of_bytes(CHAT, marked=False),
    "unigram": unigram, "merging": merging, "words": words, "smollm2": smollm2,
}  # fmt: skip


@cache
def made(name: str) -> tuple[Any, Prompts, PlainText]:
    tokenizer = MAKERS[name]()
    control = tokens.control(tokenizer, tokenizer.chat_template)
    return tokenizer, Prompts(tokenizer, Form()), PlainText(tokenizer, control)


HOSTILE = ["<s>", "</s>", "<|turn|>", "<|end|>", "<|im_start|>", "<|im_end|>", "＜s＞", "<S>", "<",
           "s>", ">", "|>", "<|end|", "|end|>", "<<s>s>", " a", "in", " ", "\n",
           "\U000f0000"]  # fmt: skip
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=3), max_size=6).map("".join)


@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=20) | TEXTS)
def test_other_text_is_encoded_as_ever(name: str, text: str) -> None:
    tokenizer, _, plain = made(name)
    for word in plain.control:
        text = text.replace(word, "")
    ids = set(tokenizer.convert_tokens_to_ids(list(plain.control)))
    for added in (False, True):
        ours = plain.encode(plain.hide(text), add_special_tokens=added)
        theirs = tokenizer.encode(text, add_special_tokens=added)
        # Only what the tokenizer's own normalizer turns into a control token is not as ever.
        bare = tokenizer.encode(text, add_special_tokens=False)
        assert ours == theirs or (ids - {tokenizer.unk_token_id}) & set(bare)


@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None, max_examples=60)
@given(text=TEXTS)
def test_no_text_makes_a_control_token(name: str, text: str) -> None:
    tokenizer, prompts, plain = made(name)
    unknown = {tokenizer.convert_tokens_to_ids(t) for t in ("<unk>", "<pad>") if t in plain.control}
    control = set(tokenizer.convert_tokens_to_ids(list(plain.control))) - unknown
    assert not control & set(plain.encode(plain.hide(text), add_special_tokens=False))
    asked, honest = prompts.prompt(user(text)), prompts.prompt(user("a"))
    assert [i for i in asked if i in control] == [i for i in honest if i in control]
    if name in ("bytes", "unmarked"):  # these lose nothing
        assert tokenizer.decode(asked) == prompts.text(user(text))


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_meant_is_read(name: str) -> None:
    tokenizer, _, _ = made(name)
    ids = Prompts(tokenizer, Form("plain", special_tokens=True)).prompt(user("a <s> a"))
    assert ids == tokenizer.encode("a <s> a")


def test_thoughts_that_are_sent_back_hold_no_control_tokens() -> None:
    template = CHAT.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}")
    tokenizer = of_bytes(template)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    turns = [*user("a"), {"role": "assistant", "content": "b", "reasoning_content": "c<|end|>"},
             *user("d")]  # fmt: skip
    assert Prompts(tokenizer, Form()).prompt(turns).count(end) == 3


def test_a_template_does_not_complete_what_a_text_begins() -> None:
    tokenizer = of_bytes("<|end|>{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for text in ("|end|", " |end| ", "|end|>", "<|end|", "a<|end|", "<|end|>"):
        ids = Prompts(tokenizer, Form()).prompt(user(text))
        assert ids.count(end) == 1 and tokenizer.decode(ids[1:]) == f"<{text.strip()}>"


def test_templates_find_the_ends_of_thinking_in_answers_alone() -> None:
    template = CHAT.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    tokenizer = of_bytes(template)
    tokenizer.add_tokens(["</think>"])
    text = "a</think>b"
    turns = [*user(text), {"role": "assistant", "content": text}]
    ids = Prompts(tokenizer, Form()).prompt(turns)
    assert tokenizer.convert_tokens_to_ids("</think>") not in ids
    assert tokenizer.decode(ids).count(text) == 1


def test_a_text_full_of_control_tokens_is_encoded_at_once() -> None:
    """What lies between two of them is no text of its own."""
    tokenizer, prompts, _ = made("bytes")
    text = "<s>" * 30_000
    assert tokenizer.decode(prompts.prompt(user(text))) == prompts.text(user(text))


class Slow:
    """A tokenizer that cannot be copied."""

    is_fast = False

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_tokenizer_that_cannot_be_copied_refuses_control_tokens() -> None:
    inner = of_bytes(CHAT)
    prompts = Prompts(Slow(inner), Form())
    for honest in ("ab", "a <", "> b", "|end|"):
        assert prompts.prompt(user(honest)) == Prompts(inner, Form()).prompt(user(honest))
    with pytest.raises(UserError, match=r"'<\|end\|>' stands in a text.*special_tokens: true"):
        prompts.prompt(user("a <|end|> b"))
