"""What a tokenizer does beside cutting text: control tokens, and words that it does not know."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

FEW = 5


def control(tokenizer: Any, template: str) -> dict[str, bool]:
    """Texts that become one token of control, each with whether the tokenizer marks it as special.

    Those that it marks, and other added ones that the chat template writes: a template may end a
    turn by a token without that mark.
    """
    added = tokenizer.added_tokens_decoder.values()
    found = dict.fromkeys(tokenizer.all_special_tokens, True)
    found |= {
        token.content: token.special
        for token in added
        if token.special or (token.content in template and token.content.strip())
    }
    return found


def unknown(tokenizer: Any, text: str) -> list[str]:
    """Words of `text`, what white space separates, that the tokenizer does not know.

    Of such a word it makes its unknown token, or leaves something out.
    """
    words = list(re.finditer(r"\S+", text))
    if not getattr(tokenizer, "is_fast", False):
        return [word.group() for word in words if _is_lost(tokenizer, word.group())]
    known = _known(tokenizer, text)
    return [
        word.group()
        for word in words
        if any(not known[i] and _counts(text[i]) for i in range(*word.span()))
    ]


def some(words: Sequence[str]) -> str:
    """The first few different words, quoted, for a message."""
    different = list(dict.fromkeys(words))
    quoted = ", ".join(repr(word[:40]) for word in different[:FEW])
    return quoted + (", …" if len(different) > FEW else "")


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[tuple[str, bool]]:
    """The text of tokens, special ones apart: pieces, each with whether it is a special token."""
    marked = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    marked |= set(tokenizer.all_special_ids)
    runs: list[tuple[list[int], bool]] = []
    for token in tokens:
        if token in marked or not runs or runs[-1][1]:
            runs.append(([], token in marked))
        runs[-1][0].append(token)
    return [(tokenizer.decode(run, skip_special_tokens=False), special) for run, special in runs]


def _known(tokenizer: Any, text: str) -> bytearray:
    """1 for each character of `text` that some token but the unknown one stands for."""
    known, blank = bytearray(len(text)), _blank(tokenizer)
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for token, (start, end) in zip(made["input_ids"], made["offset_mapping"], strict=True):
        if token not in blank or text[start:end] == tokenizer.convert_ids_to_tokens(token):
            known[start:end] = b"\x01" * (end - start)
    return known


def _blank(tokenizer: Any) -> set[int]:
    """Ids that stand for what is unknown. The model inside may have one that the outside lacks."""
    inner = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    name = getattr(inner, "unk_token", None)
    ids = {tokenizer.unk_token_id, None if name is None else tokenizer.convert_tokens_to_ids(name)}
    return ids - {None}


def _is_lost(tokenizer: Any, word: str) -> bool:
    ids = tokenizer.encode(word, add_special_tokens=False)
    return not ids or tokenizer.unk_token_id in ids


def _counts(sign: str) -> bool:
    """Whether its loss is one: marks that a normaliser joins to a letter, and what shows nothing,
    are none."""
    return unicodedata.category(sign)[0] in "LNPS"
