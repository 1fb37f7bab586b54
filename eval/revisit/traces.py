"""Where traces come from: ledger problems, worked solutions, or what `full` wrote in a study.

`find` reads files before any model is loaded; `encode` makes tokens of what it found. Prompts are
those that `compare` would give, in the same form (eval/study/prompts.py).
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicies.config import from_mapping
from kvpolicies.errors import UserError, caution
from kvpolicies.eval.revisit.config import Revisit
from kvpolicies.eval.study import asked, prompts, provenance
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.records import Grid
from kvpolicies.eval.study.results import FULL, Key, find_rows, shards
from kvpolicies.eval.study.results import NAME as RESULTS
from kvpolicies.eval.tasks.task import Problem, fingerprint
from kvpolicies.models.form import KEYS as FORM


@dataclass(frozen=True)
class Trace:
    """A prompt and the tokens that follow it."""

    id: str
    prompt: list[int]
    new: list[int]

    @property
    def tokens(self) -> list[int]:
        """All tokens that a decode processes: the last new one is chosen, and never fed."""
        return [*self.prompt, *self.new][:-1]


@dataclass(frozen=True)
class TraceSource:
    """What `find` found."""

    study: Study
    """How problems become prompts."""
    problems: list[Problem]
    """A problem a trace; the solution is the trace's own text."""
    generated: dict[str, list[int]] | None
    """New tokens by the trace's id, where a study generated them."""


def find(config: Revisit) -> tuple[Revisit, TraceSource]:
    """The traces' problems, and the config with its model's name filled in.

    Raises:
        UserError: no such file, a broken line, a study that holds no generations or others than
            its run.json says, a model that does not fit, or no trace left.
    """
    path = Path(config.traces).expanduser()
    asks: dict[str, Any] = {"problems": config.skip + config.problems}
    asks |= {key: getattr(config, key) for key in FORM}
    if config.traces == "ledger":
        name = config.model or "embedded"
        study = Study(model=name, length=config.length, **asks)
        source = TraceSource(study, study.load(), None)
    elif path.is_dir() or path.name == RESULTS:
        source = _generations(path if path.is_dir() else path.parent)
        name = source.study.model
        if config.model not in (None, name):
            raise UserError(f"traces {path}: written by model {name}, not by {config.model}")
        config = _as_asked(config, source.study)
    else:
        name = config.model or ""
        if name in ("", "embedded"):
            raise UserError(
                f"traces {path}: the embedded model knows the ledger's words only; name another "
                "with --model, for instance smollm2"
            )
        study = Study(
            model=name,
            task="fidelity",
            data=str(path),
            max_new_tokens=config.max_new_tokens,
            **asks,
        )
        source = TraceSource(study, study.load(), None)
    chosen = source.problems[config.skip : config.skip + config.problems]
    if not chosen:
        raise UserError(
            f"traces {config.traces}: {len(source.problems)} of them, all passed over by "
            f"skip {config.skip}"
        )
    return replace(config, model=name), replace(source, problems=chosen)


def _as_asked(config: Revisit, study: Study) -> Revisit:
    """With the form in which the study asked; another one is refused."""
    for key in FORM:
        mine, theirs = getattr(config, key), getattr(study, key)
        if mine not in (theirs, getattr(Revisit, key)):
            raise UserError(f"traces {config.traces}: asked with {key} {theirs!r}, not {mine!r}")
    return replace(config, **{key: getattr(study, key) for key in FORM})


def encode(
    config: Revisit, source: TraceSource, tokenizer: Any
) -> tuple[list[Trace], dict[str, Any]]:
    """The traces as tokens, in order; and how they were asked (`asked.describe`).

    Raises:
        UserError: a trace of fewer than two new tokens (the first has no query of its own), or a
            tokenizer that does not know the ledger's words.
    """
    study = replace(source.study, samples=1, temperature=0.0)
    traces, requests = [], prompts.encode(study, source.problems, tokenizer)
    for request in requests:
        new = request.forced
        if source.generated is not None:
            new = source.generated[request.problem.id]
        elif new is None:
            new = tokenizer.encode(request.problem.solution, add_special_tokens=False)
        new = new[: config.max_new_tokens]
        if len(new) < 2:
            raise UserError(f"trace {request.problem.id!r}: {len(new)} new tokens; 2 are needed")
        traces.append(Trace(request.problem.id, request.prompt, new))
    return traces, asked.describe(study, requests, tokenizer)


def _generations(folder: Path) -> TraceSource:
    """What `full` wrote in a study's folder, a problem a sample."""
    try:
        known = provenance.read_record(folder)
    except UserError as error:
        raise UserError(f"traces {folder}: no study's folder: {error}") from None
    values, before = known["study"], known["problems_fingerprint"]
    study = from_mapping(Study, values, f"traces {folder}: {provenance.NAME}")
    problems = {problem.id: problem for problem in study.load()}
    if fingerprint(list(problems.values())) != before:
        raise UserError(f"traces {folder}: {study.data} has changed since the study was run")
    if not shards(folder):
        raise UserError(f"traces {folder}: holds no {RESULTS}")
    order = {name: place for place, name in enumerate(problems)}
    every = find_rows(folder, Grid.of(study, problems))
    if said := every.said(folder):
        caution(said)
    rows = [row for row in every.rows if row["policy"] == FULL and row["tokens"]]
    found, generated = [], {}
    for row in sorted(rows, key=lambda row: (order[row["problem"]], row["sample"])):
        key = Key.of(row)
        name = key.problem if study.samples == 1 else f"{key.problem}#{key.sample}"
        problem = problems[key.problem]
        found.append(replace(problem, id=name, solution=json.dumps(row["tokens"])))
        generated[name] = row["tokens"]
    if not found:
        raise UserError(f"traces {folder}: holds no text that full generated")
    return TraceSource(study, found, generated)
