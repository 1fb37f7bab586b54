"""Text as it comes: in the end the very text of all tokens, cut at the first stop string."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvpolicies.models import embedded
from kvpolicies.models.text import PATIENCE, Detokenizer, Writer

TEXT = "Zoë – 你好, мир! 👩‍👩‍👧 e\u0301 \u0000 \ufffd end  two  spaces\n\n"
WORDS = ["▁Hello", "▁world", "ly", "▁", ".", "</s>"]


def byte_level() -> Tokenizer:
    """One token a byte, as in GPT-2's tokenizer without its merges."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Words that carry their space, and bytes for the rest, as in Llama-2's tokenizer."""
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    tokenizer.add_special_tokens(["</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])  # type: ignore
    return tokenizer


def decode(tokenizer: Tokenizer) -> Any:
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def written(tokens: list[int], tokenizer: Tokenizer, stops: list[str] | None = None) -> str:
    writer = Writer(decode(tokenizer), stops or [])
    return "".join([*map(writer.feed, tokens), writer.rest()])


def test_whole_characters_as_soon_as_they_are_whole() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(decode(tokenizer))
    pieces = [detokenizer.feed(token) for token in tokenizer.encode("aé你😀b").ids]
    assert pieces == ["a", "", "é", "", "", "你", "", "", "", "😀", "b"]


def test_pieces_are_the_whole_text() -> None:
    for tokenizer in (byte_level(),):
        ids = tokenizer.encode(TEXT).ids
        assert written(ids, tokenizer) == decode(tokenizer)(ids) == TEXT
        for cut in range(len(ids)):  # ends inside of characters included
            assert written(ids[:cut], tokenizer) == decode(tokenizer)(ids[:cut])


def test_spaces_and_bytes_of_sentence_piece() -> None:
    tokenizer = sentence_piece()
    emoji = [len(WORDS) + byte for byte in "😀你😀".encode()]
    ids = [0, 1, 2, 5, 1, 3, 3, *emoji, 4, 0, *emoji[:4], 5, 5, 0]
    assert written(ids, tokenizer) == decode(tokenizer)(ids)
    assert decode(tokenizer)(ids).startswith("Hello worldly world  😀你😀. Hello😀 Hello")


def test_words_of_the_embedded_model() -> None:
    tokenizer = embedded.load()[1]
    ids = tokenizer("ledger bob 7 ann 3 plan #1 ann")["input_ids"]
    assert written(ids, tokenizer) == tokenizer.decode(ids)  # type: ignore[arg-type]


@given(st.binary(max_size=40))
def test_any_bytes(raw: bytes) -> None:
    tokenizer = byte_level()
    letters = pre_tokenizers.ByteLevel.alphabet()
    ids: Any = [tokenizer.token_to_id(c) for c in sorted(letters)]
    tokens = [ids[byte] for byte in raw]
    assert written(tokens, tokenizer) == decode(tokenizer)(tokens)


def test_bytes_that_never_become_a_character_do_not_pile_up() -> None:
    tokenizer = byte_level()
    (start,) = tokenizer.encode("é").ids[:1]
    detokenizer = Detokenizer(decode(tokenizer))
    longest = 0
    for _ in range(5 * PATIENCE):
        detokenizer.feed(start)
        longest = max(longest, len(detokenizer.tokens) - detokenizer._start)
    assert longest <= 2 * PATIENCE and len(detokenizer.sent) >= 4 * PATIENCE


@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (["好"], "Zoë – 你"),
        (["мир"], "Zoë – 你好, "),
        ([", м", "мир"], "Zoë – 你好"),
        (["never", "Z"], ""),
        (["ends"], TEXT),
        (["spaces\n\n!"], TEXT),
        (["\n\n"], TEXT[:-2]),
        (["\u0000"], TEXT[: TEXT.index("\u0000")]),
        (["\ufffd"], TEXT[: TEXT.index("\ufffd")]),
    ],
)
def test_stop_strings_lie_across_tokens(stops: list[str], kept: str) -> None:
    tokenizer = byte_level()
    assert written(tokenizer.encode(TEXT).ids, tokenizer, stops) == kept


def test_one_stop_string_anywhere() -> None:
    tokenizer, rng = byte_level(), random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(20)))
        stop = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 5)))
        assert written(tokenizer.encode(text).ids, tokenizer, [stop]) == text.split(stop)[0]
