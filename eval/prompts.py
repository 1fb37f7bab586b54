"""From a problem to the tokens a model sees, and back from tokens to text.

Chat models are asked through their own template, once, with nothing hidden added; a model without
one gets `Question: ... Answer:`. The ledger needs its words as single tokens. Each request is one
sample of one problem; `identity` seeds it, whatever the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.eval.study import Study
from kvpolicies.eval.tasks import Problem

LEDGER_SLACK = 16
"""New tokens beyond the right trace's: a right trace needs none of them."""


@dataclass(frozen=True)
class Request:
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


def encode(study: Study, problems: Sequence[Problem], tokenizer: Any) -> list[Request]:
    """The requests of a resolved study, problem by problem.

    Raises:
        UserError: a prompt of zero tokens, or a tokenizer that does not know the ledger's words.
    """
    requests = []
    for number, problem in enumerate(problems):
        prompt = _prompt(problem, tokenizer)
        if not prompt:
            raise UserError(f"problem {problem.id!r}: the prompt has zero tokens")
        forced = _forced(study, problem, tokenizer)
        limit = _limit(study, problem, forced)
        for sample in range(study.samples):
            identity = number * study.samples + sample
            requests.append(Request(identity, problem, sample, prompt, limit, forced))
    return requests


def decode(tokens: Sequence[int], tokenizer: Any) -> str:
    """The text of new tokens, special tokens left out."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def _prompt(problem: Problem, tokenizer: Any) -> list[int]:
    if problem.ledger is not None:
        tokens = tokenizer.encode(problem.text, add_special_tokens=False)
        known = len(tokens) == len(problem.text.split())
        if not known or tokenizer.unk_token_id in tokens:
            raise UserError(
                "task ledger needs a model trained on ledger traces, such as --model embedded; "
                "this model's tokenizer splits the ledger's words"
            )
        return tokens
    if not tokenizer.chat_template:
        text = f"Question: {problem.text}\nAnswer:"
        return tokenizer.encode(text)
    turn = [{"role": "user", "content": problem.text}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _forced(study: Study, problem: Problem, tokenizer: Any) -> list[int] | None:
    if not study.entry.forced:
        return None
    tokens = tokenizer.encode(problem.solution, add_special_tokens=False)
    return tokens[: study.max_new_tokens]


def _limit(study: Study, problem: Problem, forced: list[int] | None) -> int:
    if forced is not None:
        return len(forced)
    if study.max_new_tokens is not None:
        return study.max_new_tokens
    assert problem.ledger is not None, "only ledger problems bring their own length"
    return len(problem.solution.split()) + LEDGER_SLACK
