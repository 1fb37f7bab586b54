"""What a policy still held of a text, at a few points of it: recorded while a study runs.

A result row of a study's first problems gets one field more, `held`, from which the report shows
texts with the tokens that were gone. It lies in the row, so that it is resumed, shared and merged
with it, and costs nothing to ask for later. Its size is bounded: a digit for each shown token at
each of `POINTS`, whatever the model's layers and heads.
"""

from collections.abc import Sequence
from typing import Any

from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.prompts import StudyRequest
from kvpolicies.generation import Generation
from kvpolicies.models.text import Detokenizer
from kvpolicies.trace import EvictionTrace

KEY = "held"
POINTS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the new tokens after which is looked."""
FIRST, LAST = 400, 1600
"""Tokens that are shown of a longer text: its beginning and its end."""
ALL = 9
"""The digit of a token that every head holds; 0: none does."""


def wanted(study: Study, request: StudyRequest) -> bool:
    """Whether this request is among those that are recorded: the first problems' first samples."""
    return request.sample == 0 and request.identity < study.texts


def field(study: Study, request: StudyRequest, made: Generation, tokenizer: Any) -> dict[str, Any]:
    """{"held": ...} for the row of a generation with a trace; nothing for a request not wanted.

    `made` is as the loop fed it: where tokens were forced, with these.
    """
    if made.trace is None or not wanted(study, request):
        return {}
    return {KEY: held(made.trace, made.prompt_tokens, made.tokens, tokenizer)}


def held(
    trace: EvictionTrace, prompt: int, tokens: Sequence[int], tokenizer: Any
) -> dict[str, Any]:
    """What stands in a row.

    Args:
        trace: of one sequence (B = 1): T tokens, all but the last new one, which has no keys.
        prompt: tokens of the prompt.
        tokens: the new tokens, at least one.

    Returns:
        pieces: the shown tokens' texts, of prompt and new ones; together the text.
        prompt: how many of the pieces are the prompt's.
        gap: [how many pieces come before the tokens that are not shown, how many those are].
        after: new tokens written at each of `POINTS`.
        levels: for each of `POINTS` a digit a piece: the share of KV heads, of all layers that
            evict, whose cache holds the token for the query that chose the last of these new
            tokens, from 0 (none) to 9 (all). Later pieces, which have no keys yet, have no digit.
    """
    every = [*trace.tokens[0].tolist()[:prompt], *tokens]
    shown = list(range(len(every)))
    gap = len(every) - FIRST - LAST
    if gap > 0:
        del shown[FIRST : FIRST + gap]
    after = [max(1, round(point * len(tokens))) for point in POINTS]
    pieces = _pieces(every, tokenizer)
    return {
        "pieces": [pieces[t] for t in shown],
        "prompt": sum(t < prompt for t in shown),
        "gap": [FIRST, gap] if gap > 0 else [0, 0],
        "after": after,
        "levels": [_levels(trace, prompt + count - 2, shown) for count in after],
    }


def _levels(trace: EvictionTrace, query: int, shown: Sequence[int]) -> str:
    heads = trace.times.shape[1] * trace.times.shape[2]
    counts = trace.kept(query)[0].flatten(0, 1).sum(0).tolist()
    return "".join(str(level(counts[t], heads)) for t in shown if t <= query)


def level(count: int, of: int) -> int:
    """0 for none, 9 for all, 1 to 8 for what lies between."""
    if count in (0, of):
        return ALL if count else 0
    return 1 + count * (ALL - 1) // of


def _pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """One text a token; of a character made by several tokens, at the last of them."""
    reader = Detokenizer(lambda part: tokenizer.decode(part, skip_special_tokens=False))
    pieces = [reader.feed(token) for token in tokens]
    pieces[-1] += reader.rest()
    return pieces
