"""Before a study runs: all that can be wrong with it is found here, and nothing is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicies.adapter import inspect_model
from kvpolicies.admission import in_force
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.eval import launch, models, prompts, provenance
from kvpolicies.eval.launch import Group
from kvpolicies.eval.prompts import Request
from kvpolicies.eval.study import Study
from kvpolicies.eval.tasks import Problem
from kvpolicies.registry import resolve


@dataclass(frozen=True)
class Prepared:
    """A resolved study whose every cell can run, with what it runs on."""

    study: Study
    group: Group
    problems: list[Problem]
    model: Any
    tokenizer: Any
    requests: list[Request]


def prepare(study: Study, before: Prepared | None = None) -> Prepared:
    """Loads problems and model, and tries every policy and budget on them. Writes nothing.

    Args:
        before: another study, whose model serves this one too if it is the same.

    Raises:
        UserError: anything wrong with the input, before a model is loaded where it can be known.
    """
    study = study.resolved()
    place = launch.here()
    group = launch.Group(study.tensor_parallel, place)
    problems = study.entry.load(study)
    models.check_name(study.model)
    models.check_device(study.device)
    provenance.check_folder(study, problems)
    if before and group.size == 1 and _same_model(study, before.study):
        model, tokenizer = before.model, before.tokenizer
    else:
        device = launch.device(study.device, place)
        model, tokenizer = models.load(study.model, study.dtype, device, group.size)
    for name in study.policies:
        inspect_model(model, policy := resolve(name))
        policy.check_model(model)
    requests = prompts.encode(study, problems, tokenizer)
    check_budgets(study, requests)
    return Prepared(study, group, problems, model, tokenizer, requests)


def _same_model(one: Study, other: Study) -> bool:
    return all(
        getattr(one, key) == getattr(other, key)
        for key in ("model", "dtype", "device", "tensor_parallel")
    )


def check_budgets(study: Study, requests: Sequence[Request]) -> None:
    """Raises UserError if a budget is impossible for a request, or for a policy with it."""
    policies = [resolve(name) for name in study.policies]
    for budget in study.budgets:
        for request in requests:
            prompt, limit = len(request.prompt), request.max_new_tokens
            try:
                Budget.parse(budget, length=request.length)
                for policy in policies:
                    in_force(policy, budget, prompt, limit, request.length)
            except UserError as error:
                where = f"problem {request.problem.id!r} ({request.length} tokens)"
                raise UserError(f"budget {budget} of {where}: {error}") from None
