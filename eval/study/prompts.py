"""From a study's problems to requests, and what is to be known of how they were asked.

A problem's text, which its task writes, is one turn of the user's, rendered as a deployment renders
it (kvpolicies/models/prompts.py). Each request is one sample of one problem; `identity` seeds it,
whatever the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.tasks.ledger import LedgerProblem
from kvpolicies.eval.tasks.task import Problem
from kvpolicies.models import tokens
from kvpolicies.models.prompts import Prompts, user

LEDGER_SLACK = 16
"""New tokens beyond the right trace's: a right trace needs none of them."""


@dataclass(frozen=True)
class StudyRequest:
    """One sample of one problem, as tokens."""

    identity: int
    problem: Problem
    sample: int
    prompt: list[int]
    max_new_tokens: int
    forced: list[int] | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and most new tokens: what a ratio budget is a share of."""
        return len(self.prompt) + self.max_new_tokens


def encode(study: Study, problems: Sequence[Problem], tokenizer: Any) -> list[StudyRequest]:
    """The requests of a resolved study: the first sample of each problem, then the second.

    More problems, or more samples of each, leave the requests that were there as they were.

    Raises:
        UserError: a prompt of zero tokens or that the chat template refuses, a tokenizer that does
            not know the ledger's words.
    """
    prompts, requests = Prompts(tokenizer, study), []
    for number, problem in enumerate(problems):
        if problem.ledger is not None:
            check_words(problem.ledger, tokenizer)
        try:
            prompt = prompts.prompt(user(problem.text))
        except UserError as error:
            raise UserError(f"problem {problem.id!r}: {error}") from None
        if not prompt:
            raise UserError(f"problem {problem.id!r}: the prompt has zero tokens")
        forced = _forced(study, problem, prompts)
        limit = _limit(study, problem, forced)
        requests.append(StudyRequest(number, problem, 0, prompt, limit, forced))
    more = [
        replace(first, identity=sample << 32 | first.identity, sample=sample)
        for sample in range(1, study.samples)
        for first in requests
    ]
    return requests + more


def decode(tokens: Sequence[int], tokenizer: Any) -> str:
    """The text of new tokens, special tokens left out."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def check_words(problem: LedgerProblem, tokenizer: Any) -> None:
    """Raises UserError unless each word of a ledger problem is one token that the model knows."""
    text = f"{problem.prompt} {problem.trace}"
    single = len(tokenizer.encode(text, add_special_tokens=False)) == problem.length
    if not single or tokens.unknown(tokenizer, text):
        raise UserError(
            "task ledger needs a model trained on ledger traces, such as --model embedded; "
            "this model's tokenizer splits the ledger's words, or does not know them"
        )


def _forced(study: Study, problem: Problem, prompts: Prompts) -> list[int] | None:
    if not study.entry.forced:
        return None
    return prompts.answer(problem.solution)[: study.max_new_tokens]


def _limit(study: Study, problem: Problem, forced: list[int] | None) -> int:
    if forced is not None:
        return len(forced)
    if study.max_new_tokens is not None:
        return study.max_new_tokens
    assert problem.ledger is not None, "only ledger problems bring their own length"
    return len(problem.solution.split()) + LEDGER_SLACK
