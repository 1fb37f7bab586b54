"""Before a study runs: all that can be wrong with it is found here, and nothing is written.

What can be told without torch is told first, and without its import: `check`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicies.errors import UserError, caution
from kvpolicies.eval.study import asked, launch, prompts, provenance
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.launch import Group
from kvpolicies.eval.study.prompts import StudyRequest
from kvpolicies.eval.tasks.task import Problem
from kvpolicies.models import loading
from kvpolicies.positions import check_positions
from kvpolicies.registry import resolve

ROW = 1500
"""Bytes of a row of results in memory, at the least."""


@dataclass(frozen=True)
class Prepared:
    """A resolved study whose every cell can run, with what it runs on."""

    study: Study
    group: Group
    problems: list[Problem]
    model: Any
    tokenizer: Any
    requests: list[StudyRequest]
    asked: dict[str, Any]
    """How the requests ask (asked.py)."""


class SharedModel:
    """What studies one after another share: a model, never two at a time, and a process group.

    A context: on leaving, both are given back.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._made: tuple[Any, Any] | None = None
        self._group: Group | None = None

    def __enter__(self) -> "SharedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self._made = None
        if self._group is not None:
            self._group.close()

    def load(self, study: Study, device: str, group: Group) -> tuple[Any, Any]:
        """(model, tokenizer) of a study: the last one's where they are the same."""
        key = (study.model, study.dtype, device, group.size)
        if self._made is None or key != self._key:
            self._made = None  # given back before the next one comes
            self._made, self._key = loading.load(*key), key
            self._group = group if group.size > 1 else self._group  # which loading it has made
        return self._made


def prepare(study: Study, kept: SharedModel, problems: list[Problem] | None = None) -> Prepared:
    """Loads problems and model, and tries every policy and budget on them. Writes nothing.

    A folder that holds more than was asked for is gone on with as a whole.

    Args:
        kept: of all studies that are prepared one after another.
        problems: what `check` found, where it was asked before.

    Raises:
        UserError: anything wrong with the input, before a model is loaded where it can be known.
    """
    problems = check(study) if problems is None else problems
    place = launch.here()
    group = launch.Group(study.tensor_parallel, place)
    wanted = study.resolved()
    study = provenance.joined(wanted)
    if study.problems != wanted.problems:
        problems = check(study)
    provenance.check_folder(study, problems)
    if place.leads and (more := _more(study, wanted)):
        caution(f"--out {study.out} goes on with all that it holds: {more}")
    from kvpolicies.adapter import inspect_model

    model, tokenizer = kept.load(study, launch.device(study.device, place), group)
    for name in study.policies:
        inspect_model(model, policy := resolve(name))
        policy.check_model(model)
    requests = prompts.encode(study, problems, tokenizer)
    for request in requests:
        what = f"the prompt of problem {request.problem.id!r}"
        check_positions(model, len(request.prompt), request.max_new_tokens, what)
    check_room(study, requests, model)
    check_budgets(study, requests, inspect_model(model).evicted)
    told = asked.describe(study, requests, tokenizer)
    return Prepared(study, group, problems, model, tokenizer, requests, told)


def _more(study: Study, wanted: Study) -> str:
    """What a study has beyond the one that was wanted, in words."""
    said = []
    for name in ("policies", "budgets"):
        also = [one for one in getattr(study, name) if one not in getattr(wanted, name)]
        said += [f"also the {name} {', '.join(also)}"] if also else []
    for name in ("problems", "samples"):
        if getattr(study, name) != getattr(wanted, name):
            said.append(f"{getattr(study, name)} {name}, not {getattr(wanted, name)}")
    return "; ".join(said)


def check(study: Study) -> list[Problem]:
    """The problems of a study that is not resolved yet, after a look at all but its model.

    Raises:
        UserError: anything wrong with the input that can be told without torch.
    """
    study.check()
    launch.Group(study.tensor_parallel, launch.here())
    loading.check_name(study.model)
    loading.check_device(study.device)
    provenance.check_makeable(Path(study.out))
    asked_for = study.problems or study.entry.problems
    if not study.entry.needs_data:  # else no more than there are
        check_rows(study, asked_for)
    problems = replace(study, problems=asked_for).load()
    check_rows(study, len(problems))
    return problems


def check_room(study: Study, requests: Sequence[StudyRequest], model: Any) -> None:
    """Raises UserError if the device cannot hold full's longest samples, a batch of them at once.

    What other policies hold at once is no more than that, their own state aside.
    """
    from kvpolicies import room
    from kvpolicies.models import memory

    longest = max(requests, key=lambda request: request.length)
    rows = min(study.batch_size or 1, len(requests))
    limit = longest.max_new_tokens
    held = memory.predict(model, "full", "100%", rows, len(longest.prompt), limit)
    what = f"full on {rows} samples of up to {longest.length:,} tokens at once, the model with it,"
    room.check(held.total, what, "lower max_new_tokens or batch_size", model.device)


def check_rows(study: Study, problems: int) -> None:
    """Raises UserError if the rows of so many problems would not fit into this machine."""
    from kvpolicies import room

    cells = 1 + max(1, len(study.policies)) * len(study.budgets or study.entry.budgets)
    rows = problems * study.samples * cells
    what = f"{problems:,} problems x {study.samples:,} samples x {cells} cells = {rows:,} rows"
    room.check(rows * ROW, what, "lower problems or samples")


def check_budgets(study: Study, requests: Sequence[StudyRequest], layers: int) -> None:
    """Raises UserError if a budget is impossible for a request, or for a policy with it.

    `layers`: those of the model that are evicted.
    """
    from kvpolicies.admission import asked_for, scheduled_layers

    policies = [resolve(name) for name in study.policies]
    for budget in map(study.budget_spec, study.budgets):
        for request in requests:
            prompt, limit = len(request.prompt), request.max_new_tokens
            try:
                budget.of(request.length)
                for policy in policies:
                    own = asked_for(policy, budget, prompt + limit, request.length)
                    scheduled_layers(policy, own, prompt, limit, layers)
            except UserError as error:
                where = f"problem {request.problem.id!r} ({request.length} tokens)"
                raise UserError(f"budget {budget} of {where}: {error}") from None
