"""revisit.html: one self-contained page, and whatever else is made of an analysis' rows."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpolicies.eval.display.figures import data_uri
from kvpolicies.eval.display.pages import render
from kvpolicies.eval.revisit import summary as summaries
from kvpolicies.eval.revisit.attention import NEEDED
from kvpolicies.eval.revisit.config import Revisit
from kvpolicies.eval.revisit.figures import CAPTIONS, pages, write_figures
from kvpolicies.eval.revisit.summary import losses_table
from kvpolicies.eval.study import provenance
from kvpolicies.files import write_text
from kvpolicies.layer_shares import KEY

__all__ = ["NAME", "losses_table", "write"]

NAME = "revisit.html"
SHOWN = 3
"""Traces whose text is on the page."""
SHADES = 9
_TEMPLATE = Path(__file__).with_name("revisit.html.j2")


def write(folder: Path, config: Revisit, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Writes revisit.json, the CSVs, the PNGs and the page; returns the summary."""
    summary = summaries.summarise(config, rows)
    summaries.write(folder, summary, rows)
    written = write_figures(folder, summary, rows[0]["picture"])
    headings, lines = losses_table(summary)
    page = render(
        _TEMPLATE,
        title=f"Thought revisiting: {config.model}",
        sentences=summary["sentences"],
        headings=headings,
        lines=lines,
        plots=[
            {
                "name": name,
                "caption": CAPTIONS[name],
                "light": data_uri(written[f"{name}-light"]),
                "dark": data_uri(written[f"{name}-dark"]),
            }
            for name in pages(written)
        ],
        texts=[_text(row) for row in rows[:SHOWN]],
        others=len(rows[SHOWN:]),
        shades=range(1, SHADES + 1),
        run=provenance.read_record(folder),
    )
    write_text(folder / NAME, page)
    return summary


def write_profile(path: Path, config: Revisit, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes what each layer needs as the shares of its budget: a file for `layers:`.

    The mean over all queries of new tokens, as layers have it, of the traces in `rows`.
    """
    queries = sum(row["queries"] for row in rows)
    every = [[need * row["queries"] / queries for need in row["needs"]] for row in rows]
    shares = [float(f"{sum(layer):.6g}") for layer in zip(*every, strict=True)]
    text = (
        f"# Keys that hold {NEEDED:.0%} of a query's attention, the mean of each layer that sees "
        f"all tokens:\n# {config.model}, {len(rows)} traces of {config.traces}, {queries:,} "
        f"queries. Written by kvpolicies revisit --profile.\n{KEY}: {shares}\n"
    )
    write_text(path, text)


def _text(row: Mapping[str, Any]) -> dict[str, Any]:
    """A trace's tokens with their shades: the square root of late attention, most = darkest."""
    most = max(row["received"]) or 1.0
    tokens = []
    for i, piece in enumerate(row["pieces"]):
        got = row["received"][i]
        shade = math.ceil(SHADES * math.sqrt(got / most))
        hint = f"{i}: late attention {got:.3g}, {row['revisits'][i]} revisits"
        tokens.append({"piece": piece, "shade": shade, "hint": hint})
    first = row["prompt_tokens"]
    return {"id": row["id"], "prompt": tokens[:first], "new": tokens[first:], "most": most}
