"""docs/kept.svg: which tokens each policy still holds at one moment, and what that costs it.

    OMP_NUM_THREADS=1 python scripts/kept_picture.py

The embedded model thinks through one ledger problem, the right trace forced so that all policies
see the same tokens. At the query before a look-up every KV head's set is drawn as a line of tokens;
marks show the two that the next step needs. Answers and bytes are those of docs/study.md.
"""

import argparse
import re
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from torch import Tensor

from kvpolicies import Budget, generate
from kvpolicies.eval.tasks.ledger import LedgerProblem, make_problem
from kvpolicies.models.loading import load

DOCS = Path(__file__).resolve().parents[1] / "docs"
POLICIES = ("full", "beacon", "rkv", "kvpop_mlp", "random", "snapkv", "streaming")
SEED, STEP, SLOTS = 5, 13, 133
LEFT, AXIS, RIGHT, TOP, LINE, GAP = 96, 600, 204, 92, 4, 14
STYLE = """
  .card { fill: #ffffff; stroke: #d5d8de }
  text { fill: #24292f; font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif }
  .name { font: 600 13px ui-monospace, Menlo, Consolas, monospace; text-anchor: end }
  .title { font-size: 16px; font-weight: 600 }
  .small { fill: #59636e; font-size: 12px }
  .middle { text-anchor: middle }  .end { text-anchor: end }
  .gone { fill: #e7e9ee }  .score { fill: #4a6ee0 }  .sink { fill: #d9822b }
  .window { fill: #2f9e77 }  .need { stroke: #c62a55; fill: none; stroke-width: 1.5 }
  .needed { fill: #c62a55; font-weight: 600 }
  .bar { fill: #4a6ee0 }  .rest { fill: #e7e9ee }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d }
    text { fill: #e6edf3 }  .small { fill: #9aa4af }
    .gone, .rest { fill: #2b313a }  .score, .bar { fill: #7d9bff }  .sink { fill: #f0a04b }
    .window { fill: #4cc79a }  .need { stroke: #ff6b8f }  .needed { fill: #ff8fa9 }
  }
"""


def kept_sets(problem: LedgerProblem, query: int) -> dict[str, Tensor]:
    """[layers * H, query + 1] bool a policy: what each head's query number `query` sees."""
    model, tokenizer = load("embedded")
    prompt = tokenizer.encode(problem.prompt, add_special_tokens=False)
    trace = tokenizer.encode(problem.trace, add_special_tokens=False)[: query + 2 - len(prompt)]
    sets = {}
    for policy in POLICIES:
        (done,) = generate(
            model, [prompt], policy, Budget.parse(SLOTS), max_new_tokens=len(trace), forced=[trace],
            eos_token_id=[], trace=True,
        )  # fmt: skip
        assert done.trace is not None
        sets[policy] = done.trace.kept(query)[0, :, :, : query + 1].flatten(0, 1)
    return sets


def moment(problem: LedgerProblem) -> tuple[int, int, int]:
    """(query before the look-up, plan item's token, binding's token) of step `STEP`."""
    words = problem.prompt.split() + problem.trace.split()
    thinking = len(problem.prompt.split())
    name = problem.plan[STEP - 1]
    query = words.index(f"#{STEP}", thinking)
    return query, words.index(f"#{STEP}") + 1, words.index(name) + 1


def measured() -> dict[str, tuple[str, str]]:
    """(exact answers in %, bytes of the cache) by policy, from the study's table."""
    table = (DOCS / "study.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    rows = [row for row in rows if len(row) == 8 and row[1] in (str(SLOTS), "–")]
    return {row[0]: (re.split(r"[ (]", row[2])[0], row[6]) for row in rows}


def strip(kept: Tensor, query: int, top: float) -> list[str]:
    """A policy's lines of tokens, one a KV head; a path a colour, a box a run of equal tokens."""
    budget, tokens = Budget.parse(SLOTS), query + 1
    width = AXIS / tokens
    paths: dict[str, str] = dict.fromkeys(("gone", "sink", "score", "window"), "")
    for line, row in enumerate(kept.tolist()):
        kinds = [
            "gone" if not seen else "sink" if t < budget.sinks
            else "window" if t >= tokens - budget.window else "score"
            for t, seen in enumerate(row)
        ]  # fmt: skip
        t = 0
        for kind, run in groupby(kinds):
            n = len(list(run))
            x, y, high = LEFT + t * width, top + line * LINE, LINE - 0.8
            paths[kind] += f"M{x:.1f} {y:.1f}h{n * width:.1f}v{high}H{x:.1f}z"
            t += n
    return [f'<path class="{kind}" d="{path}"/>' for kind, path in paths.items() if path]


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """One line of text."""
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(words)}</text>'


def legend(y: float) -> list[str]:
    """What the colours mean."""
    parts, x = [], LEFT
    for kind, words in (
        ("sink", "sinks"), ("score", "kept by the policy's score"), ("window", "protected window"),
        ("gone", "evicted"),
    ):  # fmt: skip
        parts.append(f'<rect class="{kind}" x="{x}" y="{y - 10:.0f}" width="12" height="12"/>')
        parts.append(text(x + 18, y, words, "small"))
        x += 44 + 6.4 * len(words)
    return parts


def row(policy: str, kept: Tensor, query: int, top: float, figures: tuple[str, str]) -> list[str]:
    """A policy's name, lines, answers and bytes."""
    middle = top + len(kept) * LINE / 2 + 4
    share, held = int(figures[0]), figures[1]
    x = LEFT + AXIS + 18
    return [
        text(LEFT - 12, middle, policy, "name"),
        *strip(kept, query, top),
        f'<rect class="rest" x="{x}" y="{middle - 10:.0f}" width="60" height="10"/>',
        f'<rect class="bar" x="{x}" y="{middle - 10:.0f}" width="{0.6 * share:.1f}" height="10"/>',
        text(x + 68, middle, f"{share} %"),
        text(x + 120, middle, held, "small"),
    ]


def picture() -> str:
    """The whole SVG."""
    problem = make_problem(SEED, length=412)
    query, plan, binding = moment(problem)
    sets, figures = kept_sets(problem, query), measured()
    step = len(sets["full"]) * LINE + GAP
    bottom = TOP + step * len(sets) - GAP
    width, height = LEFT + AXIS + RIGHT, bottom + 58
    at = {t: LEFT + (t + 0.5) * AXIS / (query + 1) for t in (plan, binding)}
    thinking = LEFT + len(problem.prompt.split()) * AXIS / (query + 1)
    name = problem.plan[STEP - 1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'width="{width}" height="{height:.0f}" role="img">',
        f"<title>Tokens that each policy holds under one budget of {SLOTS} slots a head</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" '
        f'height="{height - 1:.0f}" rx="8"/>',
        text(20, 30, f"One budget of {SLOTS} slots a head. Policies differ in the tokens that they "
             "keep.", "title"),
        text((LEFT + thinking) / 2, 54, "prompt", "small middle"),
        text((thinking + LEFT + AXIS) / 2, 54, "thinking so far, token by token →", "small middle"),
        text(LEFT + AXIS + 18, 54, "right answers", "small"),
        text(LEFT + AXIS + 138, 54, "cache", "small"),
        text(at[binding] - 6, 80, f"{name} {dict(problem.bindings)[name]}", "needed end"),
        text(at[plan] + 6, 80, f"#{STEP} {name}", "needed"),
    ]  # fmt: skip
    for index, (policy, kept) in enumerate(sets.items()):
        parts += row(policy, kept, query, TOP + index * step, figures[policy])
    for x in at.values():
        parts.append(f'<path class="need" d="M{x:.1f} {TOP - 9}V{bottom + 4}"/>')
    note = f"Red: what step {STEP} will look up. A line is a KV head (4 layers of 2)."
    parts.append(text(LEFT, bottom + 20, f"{note} Answers: 48 problems, docs/study.md.", "small"))
    return "\n".join([*parts, *legend(bottom + 42), "</svg>"]) + "\n"


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DOCS / "kept.svg")
    args = parser.parse_args()
    args.out.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
