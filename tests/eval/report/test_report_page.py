"""The parts of the page: Pareto set, grids, lengths, texts, provenance, table.tex."""

import json
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

from kvpolicies import config
from kvpolicies.eval import report
from kvpolicies.eval.commands.compare import add_arguments
from kvpolicies.eval.display.escape import visible
from kvpolicies.eval.report import (
    analysis,
    comparisons,
    grid,
    latex,
    lengths,
    pareto,
    plots,
    samples,
)
from kvpolicies.eval.report import provenance_view as origin
from kvpolicies.eval.report import sorting as order
from kvpolicies.eval.stats.intervals import Interval
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import NAME, read_folder
from kvpolicies.eval.study.summary import summarise
from kvpolicies.eval.study.texts import KEY
from kvpolicies.eval.tasks.measures import EXACT
from tests.support.studies import make_study

HOSTILE = "<script>alert(1)</script>\0\u202eright\u2066 \ud800 & ]]> --> " + "x" * 3000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two policies at two budgets, three samples a problem, eleven problems."""
    folder, rng = tmp_path_factory.mktemp("made") / "out", np.random.default_rng(0)
    cells = ["full", *(f"{p} @ {b}" for p in ("rkv", "random") for b in ("101", "69"))]
    make_study(folder, {cell: rng.integers(0, 2, (11, 3)) for cell in cells})
    study = config.from_mapping(Study, json.loads((folder / "run.json").read_text())["study"], "")
    rows = read_folder(folder)
    return replace(study, out=str(folder)), rows, summarise(study, rows)


def test_the_pareto_set_has_no_beaten_cell_and_no_cheat(made):
    _, _, (full, *cells) = made

    def at(cell, size, value, **more):
        values = {"correct": Interval(value, value, value)}
        return replace(cell, cache_bytes=size, state_bytes=1, values=values, **more)

    a, b, c = at(cells[0], 10, 0.5), at(cells[1], 20, 0.4), at(cells[2], 20, 0.7)
    ahead, beyond = at(cells[3], 1, 1.0, lookahead=True), at(cells[3], 2, 0.9, beyond=True)
    twin, full = replace(c, policy="twin"), at(full, 99, 0.8)
    assert pareto.front(EXACT, [full, b, ahead, c, beyond, twin, a]) == [a, c, twin, full]
    assert pareto.front(EXACT, [at(full, 9, 0.7), c]) == [at(full, 9, 0.7)]


def test_points_are_moved_apart_and_keep_their_order():
    places = np.array([1.0, 5.0, 1.0, 1.05, 9.0])
    moved = pareto.spread(places, 0.2)
    rank = np.argsort(places, kind="stable")
    assert np.diff(moved[rank]).min() >= 0.2 - 1e-9
    assert moved[1] == 5 and moved[4] == 9 and abs(moved[[0, 2, 3]].mean() - 3.05 / 3) < 1e-9


def test_a_plot_for_the_page_has_no_colour_of_its_own_paper(made, tmp_path):
    study, _, cells = made
    name = "rkv(mix=$0.1$)<b>"
    named = [replace(c, policy=name) for c in cells]
    draws = plots.against_budget(study, named) | pareto.plot(study, named)
    pictures = plots.write_plots(tmp_path, draws)
    for text in pictures.values():
        assert text.startswith("<svg viewBox=") and text.endswith("</svg>")
        assert not [colour for colour in plots.LIGHT.values() if colour in text]
        assert "var(--ink)" in text and "<metadata" not in text and 'href="http' not in text
    assert "rkv(mix=$0.1$)&lt;b&gt;" in pictures["pareto"]
    ids = [re.findall(r' id="([^"]+)"', text) for text in pictures.values()]
    assert not set(ids[0]) & set(ids[-1])


def test_the_grid_counts_samples_right(made):
    study, rows, cells = made
    found = grid.grid(study, cells, rows)
    assert [line["problem"] for line in found["lines"]] == [f"p{i}" for i in range(11)]
    assert [group["budget"] for group in found["groups"]] == ["full", "101", "69"]
    ordered = order.by_budget(study, cells)
    for line in found["lines"]:
        for cell, mark in zip(ordered, line["marks"], strict=True):
            key = (cell.policy, cell.budget, line["problem"])
            right = sum(r["correct"] for r in rows
                        if (r["policy"], r["budget"], r["problem"]) == key)  # fmt: skip
            assert mark.title == f"{order.title(cell)}: right in {right:.0f} of 3"
            assert mark.sign == {0: "✗", 3: "✓"}.get(right, f"{right:.0f}")
    assert found["left_out"] == 0


def test_a_grid_too_large_is_cut_with_a_word(made, monkeypatch):
    study, rows, cells = made
    monkeypatch.setattr(grid, "MOST_PROBLEMS", 4)
    found = grid.grid(study, cells, [*rows[1:]])
    assert len(found["lines"]) == 4 and found["left_out"] == 7


def test_pairs_are_seen_from_both_sides(made):
    study, rows, cells = made
    labels = {cell.policy: cell.label for cell in cells}
    pairs = analysis.analyse(study, rows).pairs
    assert len(comparisons.listed(study, pairs, labels)) == len(pairs) == 6
    for one in comparisons.grids(study, pairs, labels):
        gaps = [[entry and entry["gap"] for entry in line["entries"]] for line in one["lines"]]
        turned = [[gap and gap.translate({43: "−", 8722: "+"}) for gap in column]
                  for column in zip(*gaps, strict=True)]  # fmt: skip
        assert gaps == turned and all(gaps[i][i] is None for i in range(3))
    assert comparisons.chance(0.0) == "< 0.001" and comparisons.chance(float("nan")) == "–"


def test_lengths_are_on_one_scale(made):
    study, rows, cells = made
    rows = [{**row, "length": 100 if row["policy"] == "full" else 50} for row in rows]
    found = lengths.lengths(study, cells, rows)
    assert found is not None
    lines = found["lines"]
    assert lines[0]["at"] == [lengths.WIDTH] * 5 and lines[1]["at"] == [lengths.WIDTH / 2] * 5
    assert len(lines[0]["dots"]) == 33 and lines[1]["median"] == 50


def test_texts_are_those_on_which_cells_differ_most(made):
    study, rows, cells = made
    rows = [{**row, "text": "t", "correct": int(row["problem"] == "p9" and row["policy"] == "rkv")}
            for row in rows]  # fmt: skip
    found = samples.samples(study, cells, rows)
    assert found is not None
    assert [p["name"] for p in found["problems"]] == ["p9", "p0", "p1", "p2", "p3", "p4"]
    assert found["recorded"] == 0 and not found["agree"]
    assert [t.verdict for t in found["problems"][0]["texts"]] == [
        "✗ wrong", "✓ right", "✗ wrong", "✓ right", "✗ wrong"
    ]  # fmt: skip
    assert samples.samples(study, cells, [{**row, "text": ""} for row in rows]) is None


def test_hostile_text_stays_text(small_study, tmp_path):
    study, folder = small_study
    record = json.loads((folder / "run.json").read_text())
    record["problem_ids"] = [HOSTILE[:34] + name for name in record["problem_ids"]]
    (tmp_path / "run.json").write_text(json.dumps(record))
    with (tmp_path / NAME).open("w") as file:
        for row in read_folder(folder):
            row["problem"] = HOSTILE[:34] + row["problem"]
            row["text"] = row[KEY]["pieces"][-1] = HOSTILE
            row[KEY]["pieces"][0] = "</i></div><img src=x onerror=alert(1)>"
            file.write(json.dumps(row) + "\n")
    report.write_report(tmp_path, study)
    page = (tmp_path / report.NAME).read_text(encoding="utf-8")
    assert page.count("<script>") == 1 and "<img" not in page and "&lt;img src=x" in page
    assert not re.search("[\0\u202e\u2066]", page)
    assert "␀‹U+202E›right‹U+2066› \ufffd &amp;" in page


def test_text_is_made_visible():
    assert visible("a\tb\nc é 漢 🙂") == "a\tb\nc é 漢 🙂"
    assert visible("\0\x1b\x7f\u2028\udfff") == "␀␛‹U+007F›‹U+2028›\ufffd"


def test_rows_of_before_have_a_page_too(small_study, tmp_path):
    study, folder = small_study
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    with (tmp_path / NAME).open("w") as file:
        for row in read_folder(folder):
            file.write(json.dumps({k: v for k, v in row.items() if k not in (KEY, "asked")}) + "\n")
    report.write_report(tmp_path, study)
    assert "rows hold no evictions" in (tmp_path / report.NAME).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "study",
    [
        Study(),
        Study(policies=("beacon(n_beacon=8)", "kvpop(scorer='a b$\\'')"), budgets=("25%", "64"),
              samples=4, temperature=0.6, top_p=0.95, seed=3, problems=5, charge_state=True),
        Study(model="-odd name", task="math500", data="it's.jsonl", dtype="bfloat16", length=99),
    ],
)  # fmt: skip
def test_the_command_repeats_the_study(study):
    import argparse

    line = origin.command({"study": study.identity()})
    words = shlex.split(line)
    assert words[:2] == ["kvpolicies", "compare"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    again = config.from_args(Study, parser.parse_args(words[2:]))
    assert again.identity() == study.identity() and again.out == origin.AGAIN


def test_provenance_tells_environments_and_changes():
    here = {"python": "3.11", "packages": {"torch": "2"}, "commit": "abc+changes", "threads": 2}
    record = {
        "study": Study().identity(), "environments": [here, {**here, "gpu": None}],
        "model": {"parameters": 1234567}, "problems": 4, "problems_fingerprint": "f",
    }  # fmt: skip
    assert origin.changed(record)
    assert origin.commands(record)[0] == "git checkout abc"
    assert origin.commands(record)[1].startswith("OMP_NUM_THREADS=2 kvpolicies compare")
    assert ("torch", ["2", "2"]) in origin.environments(record)
    assert ("parameters", "1,234,567") in origin.facts(record)


def test_the_latex_table_is_whole(made, tmp_path):
    study, _, cells = made
    odd = "[a]_b%&#$^~\\{c}<d>\u202e漢"
    latex.write(tmp_path / "t.tex", study, [replace(c, policy=odd) for c in cells])
    text = (tmp_path / "t.tex").read_text(encoding="utf-8")
    body = [line for line in text.splitlines() if not line.startswith("%")]
    begin = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", body[0])
    assert begin
    columns = begin.group(1)
    rows = [line for line in body if line.endswith(r" \\")]
    assert len(rows) == 1 + len(cells)
    for line in rows:
        assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
        assert not re.search(r"(?<!\\)[%#_]|[^\x00-\x7f]", line)
        bare = re.sub(r"\\[{}]", "", line)
        assert bare.count("{") == bare.count("}") and line.count("$") % 2 == line.count(r"\$") % 2
    assert body[-1] == r"\end{tabular}" and body[1] == r"\toprule" and body[-2] == r"\bottomrule"
    escaped = r"{}[a]\_b\%\&\#\$\textasciicircum{}\textasciitilde{}\textbackslash{}\{c\}"
    assert rows[-1].startswith(escaped + r"\textless{}d\textgreater{}")


def test_names_are_sorted_as_people_do():
    assert order.by_name(["a-10", "a-2", "7", "b", "a-2b"]) == ["7", "a-2", "a-2b", "a-10", "b"]
