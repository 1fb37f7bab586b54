"""The report in a real browser: nothing from the network, no complaint, tables that sort.

Skipped where there is no Chromium. With KVPOLICIES_SCREENSHOTS=folder its pictures stay there.
"""

import os
from pathlib import Path

import pytest

from kvpolicies.eval import report
from tests.support import browser

COLUMN = """[...document.querySelectorAll('#table .scroll table')[0].tBodies[0].rows]
    .map((row) => row.cells[%d].dataset.v)"""
HEAD = "document.querySelectorAll('#table .scroll table')[0].tHead.rows[0].cells[%d]"
OPEN = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
WIDE = "document.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    found = browser.find()
    if not found:
        pytest.skip(f"no browser on PATH ({', '.join(browser.NAMES)})")
    with browser.browsing(found, tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture
def shots(tmp_path):
    folder = Path(os.environ.get("KVPOLICIES_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize(
    ("name", "look"),
    [
        ("light", {}),
        ("dark", {"dark": True}),
        ("phone", {"width": 390}),
        ("print", {"width": 780, "media": "print"}),
        ("no-script", {"script": False}),
    ],
)
def test_the_page_asks_for_nothing_and_complains_of_nothing(page, small_study, shots, name, look):
    path = small_study[1] / report.NAME
    page.look(**look)
    page.open(path)
    page.screenshot(shots / f"report-{name}.png")
    assert (shots / f"report-{name}.png").stat().st_size > 50_000
    assert page.requests == [path.resolve().as_uri()] and page.complaints == []
    if name != "no-script":
        assert page.run(WIDE) <= look.get("width", 1280)  # nothing hangs over
        paper = page.run("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(22, 27, 34)" if name == "dark" else "rgb(255, 255, 255)")
        assert page.run("getComputedStyle(document.querySelector('figure svg path')).fill") == paper


def test_a_heading_sorts_by_mouse_and_by_key(page, small_study):
    page.look()
    page.open(small_study[1] / report.NAME)
    page.run(OPEN)
    before = [float(x) for x in page.run(COLUMN % 2)]
    page.run(HEAD % 2 + ".querySelector('button').click()")
    assert [float(x) for x in page.run(COLUMN % 2)] == sorted(before, reverse=True)
    assert page.run(HEAD % 2 + ".ariaSort") == "descending"
    page.run(HEAD % 2 + ".querySelector('button').focus()")
    page.press("Enter", 13)
    assert [float(x) for x in page.run(COLUMN % 2)] == sorted(before)
    assert page.run(HEAD % 2 + ".ariaSort") == "ascending"
    page.run(HEAD % 0 + ".querySelector('button').click()")
    assert page.run(COLUMN % 0) == ["full", "random", "streaming"]
    assert page.run(HEAD % 2 + ".ariaSort") == "none"


def test_the_point_at_which_texts_are_looked_at_can_be_chosen(page, small_study):
    page.look()
    page.open(small_study[1] / report.NAME)
    page.run(OPEN)
    kinds = (
        "[...document.querySelectorAll('.text')[1].querySelectorAll('i')].map((i) => i.className)"
    )
    end = page.run(kinds)
    page.run("(() => { const s = document.querySelector('#at'); s.value = 0;"
             "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    early = page.run(kinds)
    assert sum("hx" in kind for kind in early) > sum("hx" in kind for kind in end) == 1
    assert sum("h0" in kind for kind in early) < sum("h0" in kind for kind in end)
    assert page.run("document.querySelector('.at output').textContent") == "25 % of each answer"


def test_the_first_screen_holds_the_answer(page, small_study):
    page.look()
    page.open(small_study[1] / report.NAME)
    bottom = "document.querySelector('.first').getBoundingClientRect().bottom"
    assert page.run(bottom) < 800
    assert (
        page.run("document.querySelectorAll('details[open]').length") <= 3
    )  # those in folded parts


def test_a_line_lights_up_and_can_be_switched_off(page, small_study):
    page.look()
    page.open(small_study[1] / report.NAME)
    shown = "getComputedStyle(document.querySelector('.curve[data-policy=random]')).display"
    row = "document.querySelector('.board tr[data-policy=random]')"
    page.run(row + ".querySelector('button').focus()")
    assert page.run("document.querySelector('.first').classList.contains('lit')")
    page.run(row + ".querySelector('button').click()")
    assert page.run(shown) == "none"
    assert page.run(row + ".querySelector('button').ariaPressed") == "false"
    page.press("Enter", 13)
    assert page.run(shown) == "inline"
    page.run("document.activeElement.blur()")
    assert page.run("document.querySelector('.first').classList.contains('lit')") is False


def test_a_link_opens_what_it_leads_to(page, small_study):
    page.look()
    page.open(small_study[1] / report.NAME)
    assert not page.run("document.querySelector('#pairs').open")
    page.run("document.querySelector('a[href=\\'#pairs\\']').click()")
    page.run("new Promise((done) => setTimeout(done, 50))")
    assert page.run("document.querySelector('#pairs').open")
