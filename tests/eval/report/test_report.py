"""The report: self-contained, the same numbers everywhere, honest words."""

import csv
import re
from dataclasses import replace
from html.parser import HTMLParser

from kvpolicies.eval import report
from kvpolicies.eval.report import findings as words
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import NAME, read_rows
from kvpolicies.eval.study.summary import summarise


def rows_of(policy, budget, correct, **more):
    shared = {
        "lookups_right": 3, "lookups": 4, "finish": "stop", "length": 10, "slots": 40,
        "max_slots": 40, "cache_bytes": 2048, "state_bytes": 0, "seconds": 0.1, "tokens": [1],
        "sample": 0,
    }  # fmt: skip
    return [
        {"policy": policy, "budget": budget, "problem": f"p{i}", "correct": right, **shared, **more}
        for i, right in enumerate(correct)
    ]


def made(*cells):
    study = Study(policies=("streaming", "random"), budgets=("40",)).resolved()
    rows = [row for cell in cells for row in cell]
    return study, summarise(study, rows), rows


class Links(HTMLParser):
    """Collects everything that a page would load or link to."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("link", "iframe", "img", "object"), tag
        names = ("src", "href", "srcset", "action", "data")
        self.found += [value for name, value in attrs if name in names]


def test_the_page_loads_nothing(small_study):
    _, folder = small_study
    page = (folder / report.NAME).read_text()
    links = Links()
    links.feed(page)
    assert links.found and all(value.startswith("#") for value in links.found)
    assert "default-src 'none'" in page and page.count("<script>") == 1
    style = re.findall(r"<style>.*?</style>", page, re.S)
    assert style and not any("url(" in text or "@import" in text for text in style)
    assert "prefers-color-scheme: dark" in page


def test_the_page_and_the_csv_hold_the_table(small_study):
    study, folder = small_study
    page = (folder / report.NAME).read_text()
    summaries = summarise(study, read_rows(folder / NAME))
    headings, lines = report.table(study, summaries)
    for text in [*headings, *(entry for line in lines for entry in line)]:
        assert text in page
    with (folder / "summary.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [line["policy"] for line in table] == ["full", "streaming", "random"]
    assert all(None not in line and None not in line.values() for line in table)
    assert {float(line["over_budget"]) for line in table} == {0}


def test_plots_are_written(small_study):
    _, folder = small_study
    for name in ("correct.png", "lookups_right.png", "pareto.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_cells_are_told_apart_only_where_the_paired_interval_says_so():
    study, summaries, rows = made(
        rows_of("full", "full", [1] * 40),
        rows_of("streaming", "40", [1] * 20 + [0] * 20),
        rows_of("random", "40", [0] * 40),
    )
    text = " ".join(words.sentences(study, summaries, rows))
    assert "streaming has the highest share of exact answers, 50 (" in text
    assert "streaming is ahead, problem by problem, of random" in text
    assert "Minus full, on the same problems: −50 (" in text


def test_overlap_and_ties_are_said():
    study, summaries, rows = made(
        rows_of("full", "full", [1, 1, 1, 0]),
        rows_of("streaming", "40", [1, 0, 1, 0]),
        rows_of("random", "40", [0, 1, 0, 0]),
    )
    text = " ".join(words.sentences(study, summaries, rows))
    assert "It does not differ significantly from random" in text
    assert "Its interval overlaps with that of random" in text
    assert "With 4 problems they are wide" in text
    study, summaries, rows = made(
        rows_of("full", "full", [0, 0]),
        rows_of("streaming", "40", [0, 0]),
        rows_of("random", "40", [0, 0]),
    )
    assert "streaming and random share the highest" in words.sentences(study, summaries, rows)[1]


def test_a_full_cache_that_solves_little_is_said():
    study, summaries, rows = made(
        rows_of("full", "full", [1, 0, 0, 0, 0]), rows_of("random", "40", [0] * 5)
    )
    first = words.sentences(study, summaries, rows)[0]
    assert "little to lose" in first and "A guess is right 10 %" in first


def test_a_budget_that_did_not_hold_is_not_hidden():
    study, summaries, rows = made(
        rows_of("full", "full", [1, 1]), rows_of("random", "40", [1, 0], max_slots=41)
    )
    assert any("the cache is broken" in line for line in words.sentences(study, summaries, rows))
    assert "over budget" in report.table(study, summaries)[1][1][-3]


def test_a_papers_own_rule_is_no_contestant_where_it_holds_more():
    study = Study(policies=("rkv", "rkv(faithful=True)"), budgets=("40",)).resolved()
    rows = [
        *rows_of("full", "full", [1, 1]),
        *rows_of("rkv", "40", [1, 0]),
        *rows_of("rkv(faithful=True)", "40", [1, 1], slots=168, asked=40, max_slots=168),
    ]
    said = words.sentences(study, summarise(study, rows), rows)
    assert "At 40 slots: rkv has the highest" in said[1]
    assert "rkv(faithful=True) at 40 slots: 100" in said[2]
    assert "its paper's own rule it holds up to 168 slots" in said[2]
    assert "No head ever held more slots than its budget, or than its paper's own" in said[3]


def test_markup_in_names_is_escaped(small_study, tmp_path):
    study, folder = small_study
    for name in (NAME, "run.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    report.write_report(tmp_path, replace(study, model="<script>alert(1)</script>"))
    page = (tmp_path / report.NAME).read_text()
    assert page.count("<script>") == 1 and "&lt;script&gt;alert(1)" in page


def test_a_papers_own_rule_is_told_apart_under_ratios_too(tmp_path):
    from kvpolicies.eval.study.run import run_study

    study = Study(
        policies=("streaming", "rkv(every=32, faithful=True)"), budgets=("35%",), problems=1,
        length=150, batch_size=1, out=str(tmp_path / "ratio"),
    )  # fmt: skip
    folder = run_study(study)
    rows = read_rows(folder / NAME)
    cells = {cell.policy: cell for cell in summarise(study.resolved(), rows)}
    own = cells["rkv(every=32, faithful=True)"]
    assert own.beyond and own.max_slots > cells["streaming"].max_slots
    assert not cells["streaming"].beyond and not cells["full"].beyond
    said = " ".join(words.sentences(study.resolved(), list(cells.values()), rows))
    assert "paper's own rule" in said


CELLS = (("full", "full", 1), ("streaming", "40", 1), ("random", "40", 0))


def test_ahead_is_who_no_test_of_signs_would_doubt():
    """Of 4 problems all differ: Student's interval has no width, and yet p = 1/8."""
    few = made(*(rows_of(p, b, [right] * 4) for p, b, right in CELLS))
    assert "It does not differ significantly from random." in " ".join(words.sentences(*few))
    many = made(*(rows_of(p, b, [right] * 12) for p, b, right in CELLS))
    said = " ".join(words.sentences(*many))
    assert "streaming is ahead, problem by problem, of random." in said
