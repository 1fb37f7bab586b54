"""One trace's figures, from one dense pass over the full cache: a row of results.jsonl."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicies.adapter import LayerActivations, uncached_forward, watched_dense
from kvpolicies.errors import UserError
from kvpolicies.eval.revisit.attention import LOSSES, LayerFigures, look
from kvpolicies.eval.revisit.config import Rule
from kvpolicies.eval.revisit.evictions import Evictions
from kvpolicies.eval.revisit.setting import Setting
from kvpolicies.eval.revisit.space import Sample, mean_cosines, unrotated
from kvpolicies.eval.revisit.traces import Trace
from kvpolicies.eval.study.results import whole_lines
from kvpolicies.files import read_bytes, whole_number
from kvpolicies.rope import Rope

Row = dict[str, Any]
SUM = "sum"
"""A row's entry that tells whether the others are as they were written."""
DIGITS = 10
"""Significant digits of what is written: more than float32 has."""


def read_rows(path: Path) -> list[Row]:
    """The rows of an analysis; none if there is no file.

    Raises:
        UserError: a line that is no row of one, by its number.
    """
    rows = []
    for number, line in enumerate(whole_lines(read_bytes(path) if path.exists() else b""), 1):
        try:
            row = json.loads(line, parse_int=whole_number)
            if row.pop(SUM) != zlib.crc32(_text(row)):
                raise ValueError
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            raise UserError(
                f"{path}:{number}: not a row as an analysis wrote it; move it away"
            ) from None
        rows.append(row)
    return rows


def line_of(row: Row) -> bytes:
    """A row as `read_rows` reads it back: with a sum over all its entries, which are too many and
    too deep to be looked at one by one."""
    return _text({**row, SUM: zlib.crc32(_text(row))}) + b"\n"


def _text(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode(errors="replace")


def analyse(analysis: Setting, trace: Trace, evictions: Sequence[Evictions], pictured: bool) -> Row:
    """One trace's row.

    Args:
        evictions: one a policy and budget.
        pictured: keep a picture of one head's queries.
    """
    config, model = analysis.config, analysis.model
    rule, first = Rule.of(config, len(trace.tokens)), len(trace.prompt)
    times = [evicted.times for evicted in evictions]
    sample = Sample(config.queries) if pictured else None
    pass_ = _Pass(first, rule, times, analysis.ropes, sample, bool(config.profile))
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
        **({"needs": pass_.needs()} if config.profile else {}),
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
        needs: bool,
    ) -> None:
        self.first, self.rule, self.times, self.ropes = first, rule, times, ropes
        self.sample, self.layers, self.cosines = sample, [], []
        self.counts: list[list[list[int]]] = []
        self.heads = 0
        self.count_needs, self.needed = needs, []
        self.sums: dict[str, Tensor] = {}

    def see(self, seen: LayerActivations) -> None:
        queries, keys = seen.queries[0], seen.keys[0]
        times = [e[seen.layer] for e in self.times]
        own = look(queries, keys, seen.softmax, self.first, self.rule, times, self.count_needs)
        self.needed.append(own.needs.item() / own.is_global.numel())
        self.layers.append(seen.layer)
        self.counts.append(own.by_definition.sum(-1).flatten(1).tolist())
        self.heads += own.is_global.shape[0] * own.is_global.shape[1]
        for name in ("histogram", "received", "revisits", "totals", "lost"):
            self.sums[name] = self.sums.get(name, 0) + getattr(own, name)
        self.cosines.append(self._look_before_rope(seen, own))

    def _look_before_rope(
        self, seen: LayerActivations, own: LayerFigures
    ) -> list[list[float | None]]:
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

    def needs(self) -> list[float | None]:
        """Mean keys that a query needs, by layer (attention.NEEDED)."""
        return [_short(x) for x in self.needed]

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
