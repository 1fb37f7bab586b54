"""What is to be known of how a study asked, before its figures are read.

The form of its prompts, one of them as the model saw it, words that the tokenizer does not know,
solutions that did not fit. It stands in run.json, and from there in the report and in a choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.eval.study.prompts import StudyRequest
from kvpolicies.models import tokens
from kvpolicies.models.form import Form
from kvpolicies.models.prompts import Prompts, user

KEY = "prompts"
"""Of run.json."""
_KINDS = {
    "form": dict, "chat_template": str, "dated": bool, "problems": int, "words": int,
    "unknown": int, "problems_unknown": int, "some": str, "cut": int, "example": dict,
}  # fmt: skip
FIRST, LAST = 800, 400
"""Tokens that are shown of a longer prompt."""


def describe(form: Form, requests: Sequence[StudyRequest], tokenizer: Any) -> dict[str, Any]:
    """What run.json tells of the requests.

    Returns:
        form: template, wrapper, thinking (None where nothing switches it) and special_tokens.
        chat_template: a short hash of it; empty where none is used.
        dated: whether it writes the date of the day.
        problems, words: how many were asked; words of solutions too, where those are fed.
        unknown, problems_unknown, some: words that the tokenizer does not know, in how many
            problems, and a few of them.
        cut: solutions that are fed up to the limit of new tokens only.
        example: the first prompt's problem, its tokens, and their text in pieces, each with whether
            it is a special token.
    """
    prompts = Prompts(tokenizer, form)
    first = [request for request in requests if request.sample == 0]
    texts = [
        [prompts.text(user(request.problem.text))]
        + ([] if request.forced is None else [request.problem.solution])
        for request in first
    ]
    lost = [[word for text in both for word in tokens.unknown(tokenizer, text)] for both in texts]
    every = [word for words in lost for word in words]
    return {
        "form": asdict(prompts.form),
        "chat_template": prompts.fingerprint,
        "dated": prompts.dated,
        "problems": len(first),
        "words": sum(len(text.split()) for both in texts for text in both),
        "unknown": len(every),
        "problems_unknown": sum(map(bool, lost)),
        "some": tokens.some(every),
        "cut": sum(
            len(request.forced) < len(prompts.answer(request.problem.solution))
            for request in first
            if request.forced is not None
        ),
        "example": _example(first[0], tokenizer),
    }


def read(record: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """What `describe` told, of a run.json; None of one that has nothing of it.

    Raises:
        UserError: it has something else there.
    """
    told = record.get(KEY)
    if told is None:
        return None
    try:
        right = all(isinstance(told[key], kind) for key, kind in _KINDS.items())
        pieces = told["example"]["pieces"]
        right = right and all(isinstance(text, str) for text, _ in pieces)
        right = right and isinstance(told["example"]["tokens"], int)
        Form(**told["form"]).described()
    except (KeyError, TypeError, ValueError, AttributeError):
        right = False
    if not right:
        raise UserError(f"{where}: not the record of a study (its {KEY!r})")
    return told


def rendered(told: Mapping[str, Any]) -> str:
    """How prompts were rendered, in a sentence."""
    return f"Prompts are rendered {Form(**told['form']).described()}."


def cautions(told: Mapping[str, Any]) -> list[str]:
    """Sentences on what the model did not get to see as it was written."""
    said, of = [], f"of {told['problems']:,} problems"
    if told["unknown"]:
        said.append(
            f"The tokenizer does not know {told['unknown']:,} of the {told['words']:,} words that "
            f"are asked, in {told['problems_unknown']:,} {of} ({told['some']}): in their place the "
            "model sees a token for what is unknown, or less than the word."
        )
    if told["dated"]:
        said.append("The chat template writes the day's date, so that prompts change with it.")
    if told["cut"]:
        said.append(f"{told['cut']:,} {of} have a solution that is cut at the limit of new tokens.")
    return said


def _example(request: StudyRequest, tokenizer: Any) -> dict[str, Any]:
    ids = request.prompt
    hidden = max(0, len(ids) - FIRST - LAST)
    pieces = tokens.pieces(tokenizer, ids[:FIRST] if hidden else ids)
    if hidden:
        pieces.append((f" … {hidden:,} tokens not shown … ", True))
        pieces += tokens.pieces(tokenizer, ids[-LAST:])
    return {"problem": request.problem.id, "tokens": len(ids), "pieces": list(map(list, pieces))}
