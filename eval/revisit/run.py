"""Runs an analysis, trace by trace, resumable at any moment: a row of results.jsonl a trace.

Each policy first decodes the traces' own tokens at each budget, teacher-forced, which gives its
eviction times; one dense pass a trace over the full cache then reads the attention layer by layer.
Traces are decoded in fixed units of `batch_size`; a unit whose rows are not all there is decoded
again as it was the first time, and only missing rows are appended.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvpolicies.adapter import Watched, uncached_forward, watched_dense
from kvpolicies.admission import in_force
from kvpolicies.architecture import find_ropes, inspect_model, rotates_by_halves
from kvpolicies.decoding import generate
from kvpolicies.errors import UserError
from kvpolicies.eval import models, provenance
from kvpolicies.eval.results import NAME as RESULTS
from kvpolicies.eval.results import open_whole, whole_lines
from kvpolicies.eval.revisit.attention import LOSSES, LayerFigures, look
from kvpolicies.eval.revisit.config import Revisit, Rule
from kvpolicies.eval.revisit.space import Sample, mean_cosines, unrotated
from kvpolicies.eval.revisit.traces import Trace, encode, find
from kvpolicies.registry import resolve
from kvpolicies.rope import Rope

Row = dict[str, Any]
DIGITS = 10
"""Significant digits of what is written: more than float32 has."""


@dataclass(frozen=True)
class Analysis:
    """What the traces of a run share."""

    config: Revisit
    model: Any
    tokenizer: Any
    ropes: list[Rope]

    @property
    def cells(self) -> list[tuple[str, str]]:
        """(policy, budget), in order."""
        return [(p, b) for p in self.config.policies for b in self.config.budgets]


def run(config: Revisit) -> tuple[Revisit, list[Row]]:
    """Analyses what is missing; returns the config as it was resolved and a row a trace.

    Raises:
        UserError: anything wrong with the input: before a model is loaded where it can be known by
            then, and before any trace is read in any case.
    """
    config, source = find(config.resolved())
    assert config.model is not None
    provenance.check_folder(config, source.problems)
    done = read_rows(Path(config.out) / RESULTS)
    models.check_name(config.model)
    models.check_device(config.device)
    model, tokenizer = models.load(config.model, config.dtype, config.device)
    traces = encode(config, source, tokenizer)
    analysis = Analysis(config, model, tokenizer, find_ropes(model))
    check(analysis, traces)
    folder = provenance.open_folder(config, source.problems, provenance.describe_model(model))
    rows = {row["id"]: row for row in done}
    often = 0.2 if sys.stderr.isatty() else 20.0
    with (
        open_whole(folder / RESULTS) as file,
        tqdm(
            total=len(traces) * (len(analysis.cells) + 1), desc="traces", mininterval=often
        ) as bar,
    ):
        for begin in range(0, len(traces), config.batch_size):
            unit = traces[begin : begin + config.batch_size]
            missing = [trace for trace in unit if trace.id not in rows]
            evictions = decode(analysis, unit, begin, bar.update) if missing else {}
            for trace in missing:
                pictured = trace is traces[0]
                rows[trace.id] = row = analyse(analysis, trace, evictions[trace.id], pictured)
                line = json.dumps(row, ensure_ascii=False, allow_nan=False)
                file.write(line.encode(errors="replace") + b"\n")
                file.flush()
                bar.update()
            bar.update((begin + len(unit)) * (len(analysis.cells) + 1) - bar.n)
    return config, [rows[trace.id] for trace in traces]


def read_rows(path: Path) -> list[Row]:
    """The rows of an analysis; none if there is no file.

    Raises:
        UserError: a line that is no row of one, by its number.
    """
    rows = []
    for number, line in enumerate(whole_lines(path.read_bytes() if path.exists() else b""), 1):
        try:
            row = json.loads(line)
            if not {"id", "cells", "layers", "received"} <= row.keys():
                raise ValueError
        except (ValueError, AttributeError):
            raise UserError(f"{path}:{number}: no row of an analysis; move it away") from None
        rows.append(row)
    return rows


def check(analysis: Analysis, traces: Sequence[Trace]) -> None:
    """Raises UserError if a trace, a policy or a budget cannot be run on the model."""
    config, model = analysis.config, analysis.model
    shape = inspect_model(model)
    if None not in shape.spans:
        raise UserError(f"model {config.model}: every layer has a sliding window: nothing is far")
    if not rotates_by_halves(model):
        raise UserError(f"model {config.model}: its rotary position embedding is unknown here")
    if config.head is not None:
        layer, head = map(int, config.head.split("."))
        full = [i for i, span in enumerate(shape.spans) if span is None]
        if layer not in full or head >= shape.heads * shape.groups:
            raise UserError(
                f"revisit: no query head {config.head}: layers that see all are {full}, each of "
                f"{shape.heads * shape.groups} query heads"
            )
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for policy in map(resolve, config.policies):
        inspect_model(model, policy)
    for trace in traces:
        if context and len(trace.tokens) > context:
            raise UserError(
                f"trace {trace.id!r}: {len(trace.tokens)} tokens; the model was made for {context}:"
                " cut traces with --max-new-tokens"
            )
        for policy, budget in analysis.cells:
            try:
                length = len(trace.prompt) + len(trace.new)
                in_force(resolve(policy), budget, len(trace.prompt), len(trace.new), length)
            except UserError as error:
                raise UserError(f"budget {budget} of trace {trace.id!r}: {error}") from None
    for rope in analysis.ropes:  # what cannot be rotated so far is refused now
        rope.prepare(max(len(t.tokens) for t in traces), model.device)


@dataclass(frozen=True)
class Evictions:
    """What one policy at one budget did to one trace."""

    times: Tensor
    """[layers, H, S] int32 (trace.py)."""
    slots: int


def decode(
    analysis: Analysis, unit: Sequence[Trace], number: int, step: Callable[[int], Any]
) -> dict[str, list[Evictions]]:
    """Evictions of each policy and budget by the trace's id, the unit decoded together.

    Args:
        number: of the unit's first trace: seeds the random policy.
        step: called with the number of traces when a policy and budget is done.
    """
    found: dict[str, list[Evictions]] = {trace.id: [] for trace in unit}
    for policy, budget in analysis.cells:
        generations = generate(
            analysis.model,
            [trace.prompt for trace in unit],
            policy,
            budget,
            max_new_tokens=[len(trace.new) for trace in unit],
            forced=[trace.new for trace in unit],
            request_ids=range(number, number + len(unit)),
            seed=analysis.config.seed,
            trace=True,
        )
        for trace, made in zip(unit, generations, strict=True):
            assert made.trace is not None
            found[trace.id].append(Evictions(made.trace.times[0], made.budget_total))
        step(len(unit))
    return found


def analyse(
    analysis: Analysis, trace: Trace, evictions: Sequence[Evictions], pictured: bool
) -> Row:
    """One trace's row.

    Args:
        evictions: one a policy and budget.
        pictured: keep a picture of one head's queries.
    """
    config, model = analysis.config, analysis.model
    rule, first = Rule.of(config, len(trace.tokens)), len(trace.prompt)
    times = [evicted.times for evicted in evictions]
    pass_ = _Pass(first, rule, times, analysis.ropes, Sample(config.queries) if pictured else None)
    ids = torch.tensor([trace.tokens], device=model.device)
    for rope in analysis.ropes:
        rope.prepare(len(trace.tokens), ids.device)
    with torch.no_grad(), watched_dense(model, pass_.see):
        uncached_forward(model)(ids, torch.arange(ids.shape[1], device=ids.device)[None])
    if not bool(pass_.sums["totals"].isfinite().all()):
        raise UserError(f"trace {trace.id!r}: the model's attention holds NaN or infinity")
    picture = pass_.sample and pass_.sample.picture(config.head, first, len(trace.tokens) - first)
    return {
        "id": trace.id,
        "prompt_tokens": first,
        "length": len(trace.tokens),
        "queries": len(trace.tokens) - first,
        "k": rule.k,
        "distance": rule.distance,
        **pass_.figures(),
        "cells": [
            {"policy": p, "budget": b, "slots": evicted.slots, **lost}
            for (p, b), evicted, lost in zip(analysis.cells, evictions, pass_.losses(), strict=True)
        ],
        "picture": picture,
        "pieces": pieces(analysis.tokenizer, trace.tokens),
    }


class _Pass:
    """Sees a dense pass layer by layer, and keeps nothing of a layer but its sums."""

    def __init__(
        self,
        first: int,
        rule: Rule,
        times: list[Tensor],
        ropes: list[Rope],
        sample: Sample | None,
    ) -> None:
        self.first, self.rule, self.times, self.ropes = first, rule, times, ropes
        self.sample, self.layers, self.cosines = sample, [], []
        self.counts: list[list[list[int]]] = []
        self.heads = 0
        self.sums: dict[str, Tensor] = {}

    def see(self, seen: Watched) -> None:
        queries, keys = seen.queries[0], seen.keys[0]
        times = [e[seen.layer] for e in self.times]
        own = look(queries, keys, seen.softmax, self.first, self.rule, times)
        self.layers.append(seen.layer)
        self.counts.append(own.by_definition.sum(-1).flatten(1).tolist())
        self.heads += own.is_global.shape[0] * own.is_global.shape[1]
        for name in ("histogram", "received", "revisits", "totals", "lost"):
            self.sums[name] = self.sums.get(name, 0) + getattr(own, name)
        self.cosines.append(self._look_before_rope(seen, own))

    def _look_before_rope(self, seen: Watched, own: LayerFigures) -> list[list[float | None]]:
        late = seen.queries[0, :, :, self.first :]
        cosines = []
        for h, before in enumerate(unrotated(self.ropes[seen.layer], late, self.first)):
            for g, queries in enumerate(before):
                is_global = own.is_global[h, g].to(queries.device)
                cosines.append([_short(x) for x in mean_cosines(queries, is_global)])
                if self.sample is not None:
                    at = h * len(before) + g
                    self.sample.add(seen.layer, at, queries, own.is_global[h, g])
        return cosines

    def figures(self) -> Row:
        """Counts by layer and query head; sums over them all, `received` a mean over them all."""
        s = self.sums
        return {
            "layers": self.layers,
            "global": {
                "top-k": [both[0] for both in self.counts],
                "weighted": [both[1] for both in self.counts],
            },
            "cosines": self.cosines,
            "histogram": [[_short(x) for x in row] for row in s["histogram"].tolist()],
            "received": [_short(x) for x in (s["received"] / self.heads).tolist()],
            "revisits": [int(x) for x in s["revisits"].tolist()],
            "totals": dict(zip(LOSSES, map(_short, s["totals"].tolist()), strict=True)),
        }

    def losses(self) -> list[dict[str, float | None]]:
        """What each policy and budget lost, as LOSSES."""
        return [
            dict(zip(LOSSES, map(_short, row), strict=True)) for row in self.sums["lost"].tolist()
        ]


def _short(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.{DIGITS}g}")


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Each token's text; with a space before it where the tokenizer's are words."""
    found = [tokenizer.decode([token]) for token in tokens]
    if any(piece.startswith((" ", "\n")) for piece in found):
        return found
    return [f" {piece}" for piece in found]
