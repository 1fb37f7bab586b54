"""What a choice leaves behind: deploy.yaml, which other commands run, and selection.json.

deploy.yaml holds keys of `Deployment` and nothing else; where they come from stands above them as
comments. Both files are written whole or not at all, selection.json first.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from kvpolicies.config import Deployment
from kvpolicies.eval.display.bytesize import size
from kvpolicies.eval.select.candidates import Candidate, Figures, pareto
from kvpolicies.eval.select.decision import CHOSEN, Choice
from kvpolicies.eval.select.evidence import Evidence
from kvpolicies.eval.select.explaining import faults, points
from kvpolicies.eval.stats.intervals import Interval
from kvpolicies.files import without_nan, write_text
from kvpolicies.models.form import KEYS as FORM
from kvpolicies.models.memory import Load

KEYS = (
    "model",
    "policy",
    "budget",
    "sinks",
    "window",
    "layers",
    "kv_dtype",
    "max_new_tokens",
    "batch_size",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "dtype",
    "device",
    *FORM,
)
"""What the choice and its studies decide; the rest of `Deployment` keeps its defaults."""


def deployment(evidence: Evidence, candidate: Candidate, load: Load) -> Deployment:
    """The config that runs `candidate`: sampling, dtype, device and prompts as in the studies."""
    study = evidence.study
    form = evidence.sources[0].form or study
    return Deployment(
        model=study.model,
        policy=candidate.cell.policy,
        budget=candidate.budget,
        sinks=study.sinks,
        window=study.window,
        layers=study.layers,
        kv_dtype=study.kv_dtype,
        max_new_tokens=load.new,
        batch_size=load.batch,
        temperature=study.temperature,
        top_p=study.top_p,
        top_k=study.top_k,
        seed=study.seed,
        dtype=study.dtype,
        device=study.device,
        **{key: getattr(form, key) for key in FORM},
    )


def deploy_yaml(
    evidence: Evidence, choice: Choice, load: Load, said: Sequence[str], command: str
) -> str:
    """The text of deploy.yaml for the winner; `said` are the sentences that go with it."""
    winner = choice.winner
    assert winner is not None
    config = deployment(evidence, winner, load)
    values = {key: value for key in KEYS if (value := getattr(config, key)) is not None}
    if values["budget"].isdigit():
        values["budget"] = int(values["budget"])
    lines = ["Written by kvpolicies select.", f"command: {command}"]
    if choice.verdict != CHOSEN:
        lines.append(
            "UNDECIDED: the data could not tell; this is the best point estimate, taken "
            "by --anyway."
        )
    for source in evidence.sources:
        lines.append(
            f"study: {source.folder} ({source.study.task}, {source.problems} problems, "
            f"fingerprint {source.fingerprint}, commit {', '.join(source.commits)}, "
            f"weights {source.weights})"
        )
        lines.append(f"{source.study.task} asks: {source.study.entry.prompt!r}")
    lines += [f"{name}: {_figures(one)}" for name, one in winner.benches.items()]
    if len(winner.benches) > 1:
        lines.append(f"mean over tasks: {_figures(winner.mean)}")
    if winner.budget != winner.cell.budget and not winner.is_full:
        lines.append(f"budget: {winner.cell.budget} of {load.prompt} + {load.new} tokens")
    held = winner.memory
    lines.append(
        f"memory, predicted for {load.batch} rows of {load.prompt} + {load.new} tokens: "
        f"{size(held.total)} = weights {size(held.weights)} + cache {size(held.cache)} + "
        f"policy state {size(held.state)} + logits {size(held.logits)}"
    )
    head = "".join(f"# {_one_line(line)}\n" for line in [*lines, *said])
    return head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def selection_json(
    evidence: Evidence,
    choice: Choice,
    load: Load,
    left_out: dict[Any, str],
    said: Sequence[str],
    command: str,
) -> str:
    """Everything the choice rests on, as JSON; what cannot be told (nan) is null."""
    front = pareto(choice.candidates)
    record = {
        "verdict": choice.verdict,
        "command": command,
        "limits": asdict(choice.limits),
        "load": asdict(load),
        "level": choice.level,
        "sources": [
            {
                "folder": source.folder,
                "task": source.study.task,
                "commits": source.commits,
                "fingerprint": source.fingerprint,
                "problems": source.problems,
                "samples": source.study.samples,
                "weights": source.weights,
                "prompts": source.told,
            }
            for source in evidence.sources
        ],
        "candidates": [_candidate(choice, c, c in front) for c in choice.candidates],
        "left_out": [{**cell._asdict(), "why": why} for cell, why in left_out.items()],
        "winner": None if choice.winner is None else choice.winner.label,
        "equals": [c.label for c in choice.equals],
        "rivals": [
            {
                "candidate": rival.candidate.label,
                "better_by_at_most": rival.upper,
                "need": None if rival.need is None else asdict(rival.need),
            }
            for rival in choice.rivals
        ],
        "sentences": list(said),
    }
    return json.dumps(without_nan(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_files(texts: dict[Path, str]) -> None:
    """Writes each file whole or not at all, in order.

    Raises:
        UserError: a file that cannot be written.
    """
    for path, text in texts.items():
        write_text(path, text)


def _candidate(choice: Choice, candidate: Candidate, in_front: bool) -> dict[str, Any]:
    return {
        "policy": candidate.cell.policy,
        "budget": candidate.cell.budget,
        "deployed_budget": candidate.budget,
        "memory": {**asdict(candidate.memory), "total": candidate.memory.total},
        "held": candidate.held,
        "pareto": in_front,
        "fits": choice.fits(candidate),
        "passes": choice.passes(candidate) if choice.limits.on_accuracy else None,
        "faults": faults(choice, candidate),
        "tasks": {name: asdict(figures) for name, figures in candidate.benches.items()},
        "mean": asdict(candidate.mean),
        "tests": [
            {**asdict(test), "slack": test.slack, "passes": test.passes}
            for test in choice.tests[candidate.cell]
        ],
        "cpu_ms_per_token": candidate.cpu_ms,
    }


def _figures(figures: Figures) -> str:
    return (
        f"accuracy {_shown(figures.accuracy)} %, against full {_shown(figures.loss)} points "
        "(95 % intervals)"
    )


def _shown(interval: Interval) -> str:
    if math.isnan(interval.low):
        return points(interval.value)
    ends = f"{points(interval.low)} to {points(interval.high)}"
    return f"{points(interval.value)} ({ends})"


def _one_line(text: str) -> str:
    """Without anything that YAML takes for the end of a comment, or cannot hold."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
