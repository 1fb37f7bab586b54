"""The first screen: what one sentence says of each budget, the board, the drawing, the warning."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvpolicies import config
from kvpolicies.eval.report import overview
from kvpolicies.eval.report.analysis import Analysis, analyse
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import read_folder
from tests.support.studies import make_study

ALL, NONE = np.ones((40, 1)), np.zeros((40, 1))
HALF = np.arange(40)[:, None] % 2


def made(tmp_path, **cells) -> tuple[Study, Analysis]:
    folder = make_study(tmp_path / "out", {"full": ALL, **cells})
    study = config.from_mapping(Study, json.loads((folder / "run.json").read_text())["study"], "")
    return study, analyse(study, read_folder(folder))


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"rkv": ALL}, "69 slots: the policy does not differ significantly from full."),
        ({"rkv": NONE}, "69 slots: the policy loses significantly against full."),
        ({"rkv": NONE, "tova": NONE}, "69 slots: every policy loses significantly against full."),
        ({"rkv": ALL, "tova": ALL}, "69 slots: no policy differs significantly from full."),
        (
            {"rkv": ALL, "beacon": ALL, "tova": NONE, "random": NONE},
            "69 slots: rkv and beacon do not differ significantly from full; tova and random lose.",
        ),
        (
            {"rkv": ALL, **dict.fromkeys(("tova", "random", "h2o", "snapkv"), NONE)},
            "69 slots: rkv does not differ significantly from full; the other 4 lose.",
        ),
        (
            {"tova": NONE, **dict.fromkeys(("rkv", "beacon", "h2o", "snapkv"), ALL)},
            "69 slots: tova loses significantly against full; the other 4 do not differ "
            "significantly from it.",
        ),
    ],
)
def test_one_sentence_a_budget(tmp_path, cells, said):
    study, found = made(tmp_path, **{f"{policy} @ 69": grades for policy, grades in cells.items()})
    assert overview.answers(study, found) == [said]


def test_the_board_marks_who_does_not_differ_from_the_best(tmp_path):
    cells = {"rkv @ 69": ALL, "tova @ 69": NONE, "beacon @ 69": ALL, "random @ 69": HALF}
    study, found = made(tmp_path, **cells)
    headings, lines = overview.table(study, found)
    assert headings == ["exact answers % at", "69"]
    assert lines == [
        ["full", "100 "], ["rkv", "100*"], ["beacon", "100*"], ["random", "50 "], ["tova", "0 "],
    ]  # fmt: skip
    looks = [(line.colour, line.shape) for line in overview.board(study, found)]
    assert len(set(looks)) == 5
    drawn = overview.chart(study, found)
    assert [line["policy"] for line in drawn["lines"]] == ["rkv", "tova", "beacon", "random"]
    assert drawn["full"][1] == overview.TOP  # 100 % is at the top
    assert drawn["lines"][1]["points"][0][1] == overview.HEIGHT - overview.BOTTOM


def test_a_policy_that_looks_ahead_is_no_contestant(tmp_path):
    study, found = made(tmp_path, **{"oracle @ 69": ALL, "rkv @ 69": HALF})
    cells = [replace(cell, lookahead=cell.policy == "oracle") for cell in found.cells]
    found = replace(found, cells=cells)
    assert overview.answers(study, found) == [
        "69 slots: the policy loses significantly against full."
    ]
    assert [line.policy for line in overview.board(study, found)] == ["full", "rkv", "oracle"]


def test_the_warning_names_truncation_first(tmp_path):
    study, found = made(tmp_path, **{"rkv @ 69": HALF})
    assert overview.warning(study, found, None).startswith("None of full's 40 samples was cut off.")
    cut = replace(found.cells[0], cut=3)
    said = overview.warning(study, replace(found, cells=[cut, *found.cells[1:]]), None)
    assert said.startswith("3 of full's 40 samples were cut off at the limit of new tokens")


def test_budgets_of_as_many_slots_have_one_tick(tmp_path):
    study, found = made(tmp_path, **{"rkv @ 69": ALL, "rkv @ 101": ALL})
    cells = [replace(cell, budget="101:int8") if cell.budget == "101" else cell
             for cell in found.cells]  # fmt: skip
    cells += [replace(cells[-1], budget="101:fp8")]
    drawn = overview.chart(study, replace(found, cells=cells))
    assert [text for text, _ in drawn["ticks"]] == ["69", "101"]
