"""revisit.json and the CSVs: what all traces together say, with intervals over traces."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicies.eval.revisit.attention import BINS, LOSSES, bounds
from kvpolicies.eval.revisit.config import DEFINITIONS, Revisit
from kvpolicies.eval.revisit.space import COSINES
from kvpolicies.eval.stats import intervals as stats
from kvpolicies.files import write_csv, write_text

Row = Mapping[str, Any]
NAME = "revisit.json"
CLASSES = ("local", "global")
LOSS_HEADINGS = {
    "revisits": "revisits",
    "mass": "attention of revisits",
    "far": "all far attention",
    "all": "all attention",
}


def summarise(config: Revisit, rows: Sequence[Row]) -> dict[str, Any]:
    """All numbers of an analysis as plain data; None where there is nothing to divide by."""
    heads = len(rows[0]["global"]["top-k"][0])
    layers = rows[0]["layers"]
    queries = [row["queries"] * len(layers) * heads for row in rows]
    shares = {}
    for name in DEFINITIONS:
        counts = [int(np.sum(row["global"][name])) for row in rows]
        shares[name] = _interval(stats.share(counts, queries, config.seed))
    summary: dict[str, Any] = {
        "model": config.model,
        "config": config.identity(),
        "traces": [
            {key: row[key] for key in ("id", "prompt_tokens", "length", "queries", "k", "distance")}
            for row in rows
        ],
        "share_global": shares,
        "layers": layers,
        "heads": {name: _map(rows, name) for name in DEFINITIONS},
        "cosines": dict(zip(COSINES, _cosines(rows), strict=True)),
        "distances": _distances(config, rows, heads * len(layers)),
        "totals": {key: sum(row["totals"][key] for row in rows) for key in LOSSES},
        "losses": _losses(config, rows),
    }
    summary["sentences"] = sentences(config, summary)
    return summary


def _interval(found: stats.Interval) -> dict[str, float | None]:
    return {k: None if math.isnan(v) else round(v, 6) for k, v in found._asdict().items()}


def _map(rows: Sequence[Row], name: str) -> list[list[float]]:
    """[layers][query heads] share of global queries."""
    counts = np.sum([row["global"][name] for row in rows], axis=0)
    return np.round(counts / sum(row["queries"] for row in rows), 6).tolist()


def _cosines(rows: Sequence[Row]) -> list[list[list[float | None]]]:
    """COSINES as [layers][query heads], the mean over the traces that have one."""
    whole = np.asarray([row["cosines"] for row in rows], dtype=float)
    whole = whole.reshape(len(rows), len(rows[0]["layers"]), -1, len(COSINES))
    there = ~np.isnan(whole)
    means = np.nansum(whole, axis=0) / np.maximum(there.sum(0), 1)
    means = np.where(there.any(0), means.round(6), np.nan)
    return [
        [[None if math.isnan(x) else x for x in row] for row in means[..., i].tolist()]
        for i in range(len(COSINES))
    ]


def _distances(config: Revisit, rows: Sequence[Row], heads: int) -> dict[str, list[float | None]]:
    """A mean query's attention by distance, local and global: places as `bounds`, sinks last."""
    sums = np.sum([row["histogram"] for row in rows], axis=0)
    far = sum(int(np.sum(row["global"][config.definition])) for row in rows)
    counts = (sum(row["queries"] for row in rows) * heads - far, far)
    return {
        name: [None if not n else round(float(x) / n, 9) for x in sums[i]]
        for i, (name, n) in enumerate(zip(CLASSES, counts, strict=True))
    }


def _losses(config: Revisit, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row a policy and budget: each of LOSSES as a share, with its interval."""
    found = []
    for number, cell in enumerate(rows[0]["cells"]):
        line: dict[str, Any] = {"policy": cell["policy"], "budget": cell["budget"]}
        line["slots"] = round(float(np.mean([row["cells"][number]["slots"] for row in rows])), 1)
        for key in LOSSES:
            pairs = [(row["cells"][number][key], row["totals"][key]) for row in rows]
            pairs = [pair for pair in pairs if pair[1]]  # what has none has lost none
            lost, whole = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            line[key] = _interval(stats.share(lost, whole, config.seed))
        found.append(line)
    return found


def sentences(config: Revisit, summary: Mapping[str, Any]) -> list[str]:
    """What was used, and the main figures, in words."""
    traces = summary["traces"]
    ks, distances = ([trace[key] for trace in traces] for key in ("k", "distance"))
    lengths = [trace["length"] for trace in traces]
    used = (
        f"Used: K = {_range(ks)}, distance = {_range(distances)} tokens (asked: {config.k} and "
        f"{config.distance:g}; scaled below {config.scale_below} tokens), traces of "
        f"{_range(lengths)} tokens, definition {config.definition}, first {config.sinks} tokens "
        "left out."
    )
    shares = summary["share_global"]
    said = [
        f"{name}: {show(shares[name])} % of the queries of new tokens are global."
        for name in DEFINITIONS
    ]
    alike, heads = _alike(summary["cosines"])
    if heads:
        said.append(
            f"Before RoPE, global queries are more alike among themselves than to local ones (mean "
            f"cosine) in {alike} of the {heads} heads that have both."
        )
    if len(traces) == 1:
        said.append("One trace says nothing about the spread between traces: no intervals.")
    return [used, *said]


def _alike(cosines: Mapping[str, Any]) -> tuple[int, int]:
    """(heads in which global queries are more alike than global and local ones, heads of both)."""
    names = ("global-global", "global-local")
    within, between = (np.asarray(cosines[name], dtype=float) for name in names)
    both = ~np.isnan(within) & ~np.isnan(between)
    return int((within[both] > between[both]).sum()), int(both.sum())


def _range(values: Sequence[float]) -> str:
    low, high = (f"{x:.1f}".removesuffix(".0") for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def show(interval: Mapping[str, float | None]) -> str:
    """A share in percent with its interval, as the table shows it."""
    value, low, high = (interval[key] for key in ("value", "low", "high"))
    if value is None:
        return "–"
    if low is None or high is None:
        return f"{100 * value:.1f}"
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def losses_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(headings, lines) of what was lost."""
    lines = [
        [line["policy"], line["budget"], f"{line['slots']:g}", *(show(line[k]) for k in LOSSES)]
        for line in summary["losses"]
    ]
    return ["policy", "budget", "slots", *LOSS_HEADINGS.values()], lines


def write(folder: Path, summary: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes revisit.json and losses.csv, heads.csv, distances.csv, tokens.csv, queries.csv."""
    text = json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / NAME, text + "\n")
    ends = ("value", "low", "high")
    _csv(
        folder / "losses.csv",
        ["policy", "budget", "slots", *(f"{key}_{end}" for key in LOSSES for end in ends)],
        (
            [line["policy"], line["budget"], line["slots"]]
            + [line[key][end] for key in LOSSES for end in ends]
            for line in summary["losses"]
        ),
    )
    _csv(folder / "heads.csv", _HEADS, _head_lines(summary))
    _csv(
        folder / "distances.csv",
        ["least", "largest", *CLASSES],
        (
            [*(bounds(i) if i < BINS - 1 else ("sinks", "sinks"))]
            + [summary["distances"][name][i] for name in CLASSES]
            for i in range(BINS)
        ),
    )
    _csv(
        folder / "tokens.csv",
        ["trace", "position", "token", "late_attention", "revisits"],
        (
            [row["id"], i, piece, row["received"][i], row["revisits"][i]]
            for row in rows
            for i, piece in enumerate(row["pieces"])
        ),
    )
    picture = rows[0]["picture"]
    _csv(
        folder / "queries.csv",
        ["position", "global", "pc1", "pc2"],
        (
            [p, g, *at]
            for p, g, at in zip(
                picture["positions"], picture["global"], picture["pca"], strict=True
            )
        ),
    )


_HEADS = ["layer", "head", *(f"global_{name}" for name in DEFINITIONS), *COSINES]


def _head_lines(summary: Mapping[str, Any]) -> list[list[Any]]:
    columns = [summary["heads"][name] for name in DEFINITIONS]
    columns += [summary["cosines"][name] for name in COSINES]
    return [
        [layer, head, *(column[i][head] for column in columns)]
        for i, layer in enumerate(summary["layers"])
        for head in range(len(columns[0][i]))
    ]


def _csv(path: Path, headings: Sequence[str], lines: Any) -> None:
    write_csv(path, [headings, *lines])
