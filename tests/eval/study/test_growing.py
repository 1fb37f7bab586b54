"""A folder takes more policies, budgets, problems and samples; only another meaning is refused."""

import json
from dataclasses import replace

import pytest

from kvpolicies.errors import Caution, UserError
from kvpolicies.eval import report
from kvpolicies.eval.study import provenance, run
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import NAME, Key, read_folder, read_rows

STUDY = Study(
    policies=("random",), budgets=("30",), problems=2, length=50, batch_size=4, temperature=0.6
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """STUDY's finished folder. Read it, do not write."""
    return run.run_study(replace(STUDY, out=str(tmp_path_factory.mktemp("begun") / "out")))


@pytest.fixture
def folder(begun, tmp_path):
    """A copy of it."""
    for name in (NAME, "run.json"):
        (tmp_path / name).write_bytes((begun / name).read_bytes())
    return tmp_path


def made(folder):
    """Rows by key, without their times and the bytes allocated, which a batch's longest decides."""
    drop = ("seconds", "processor", "cache_bytes")
    return {Key.of(r): {k: v for k, v in r.items() if k not in drop} for r in read_folder(folder)}


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({"policies": ("streaming", "random"), "problems": 3}, 9),
        ({"budgets": ("36", "30"), "samples": 2}, 12),
    ],
    ids=["policy and problem", "budget and sample"],
)
def test_what_is_added_ends_as_if_it_had_been_there_from_the_start(folder, tmp_path, more, rows):
    before = (folder / NAME).read_bytes()
    grown = replace(STUDY, out=str(folder), **more)
    run.run_study(grown)
    assert (folder / NAME).read_bytes().startswith(before), "no row is computed again"
    fresh = run.run_study(replace(grown, out=str(tmp_path / "fresh")))
    assert made(folder) == made(fresh) and len(made(folder)) == rows
    record, other = (json.loads((f / "run.json").read_text()) for f in (folder, fresh))
    for key in ("problems", "problem_ids", "problems_fingerprint"):
        assert record[key] == other[key]
    asked = provenance.recorded(folder)
    for key, value in more.items():
        found = getattr(asked, key)
        assert set(found) == set(value) if isinstance(value, tuple) else found == value
    cells = report.write_report(folder, asked).cells
    assert {cell.samples for cell in cells} == {rows // len(cells)}


def test_asked_for_less_it_goes_on_with_all_and_says_so(folder, monkeypatch):
    monkeypatch.setattr(run, "generate", None)
    less = Study(
        policies=("streaming",), budgets=("30",), problems=1, length=50, batch_size=4,
        temperature=0.6, out=str(folder),
    )  # fmt: skip
    with pytest.raises(TypeError), pytest.warns(Caution) as told:  # streaming is missing
        run.run_study(less)
    says = "goes on with all that it holds: also the policies random; 2 problems, not 1"
    assert says in str(told[0].message)
    assert provenance.recorded(folder).policies == ("random", "streaming")


def test_how_rows_are_computed_may_change(folder, monkeypatch):
    monkeypatch.setattr(run, "generate", None)
    run.run_study(replace(STUDY, batch_size=1, device="cpu", out=str(folder)))
    assert json.loads((folder / "run.json").read_text())["study"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, r"seed \(0 -> 1\)"),
        ({"sinks": 2}, r"sinks \(None -> 2\)"),
        ({"window": 3}, r"window \(None -> 3\)"),
        ({"top_k": 5}, r"top_k \(0 -> 5\)"),
        ({"temperature": 0.7}, r"temperature \(0\.6 -> 0\.7\)"),
        ({"length": 60}, r"length \(50 -> 60\), the problems"),
        ({"max_new_tokens": 9, "problems": 5}, "max_new_tokens"),
        ({"charge_state": True, "policies": ("streaming",)}, "charge_state"),
    ],
)
def test_what_changes_a_rows_meaning_is_refused_and_nothing_touched(begun, changes, says):
    before = {path: path.read_bytes() for path in begun.iterdir()}
    with pytest.raises(UserError, match=f"holds another study; different: .*{says}"):
        run.run_study(replace(STUDY, out=str(begun), **changes))
    assert {path: path.read_bytes() for path in begun.iterdir()} == before


def test_a_record_of_an_older_version_lacks_options_and_names(folder, monkeypatch):
    monkeypatch.setattr(run, "generate", None)
    record = json.loads((folder / "run.json").read_text())
    ids = record.pop("problem_ids")
    for key in ("sinks", "window", "top_k"):
        del record["study"][key]
    (folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"sinks \(None -> 2\)"):
        run.run_study(replace(STUDY, sinks=2, out=str(folder)))
    run.run_study(replace(STUDY, out=str(folder)))
    assert json.loads((folder / "run.json").read_text())["problem_ids"] == ids


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_grows_meanwhile_is_completed_by_whoever_works_there(folder, monkeypatch, when):
    """Another process adds a policy just before this one opens the folder, or when it is done."""
    larger = replace(STUDY, policies=("random", "streaming"), out=str(folder)).resolved()
    name = "open_folder" if when == "before" else "joined"
    original, problems = getattr(provenance, name), larger.load()
    calls = []

    def grow(study, *more):
        calls.append(study)
        if len(calls) == (1 if when == "before" else 3):  # after prepare, and after opening
            monkeypatch.setattr(provenance, name, original)
            model = json.loads((folder / "run.json").read_text())["model"]
            assert provenance.open_folder(larger, problems, model)
        return original(study, *more)

    monkeypatch.setattr(provenance, name, grow)
    with pytest.warns(Caution, match="also the policies streaming"):
        run.run_study(replace(STUDY, out=str(folder)))
    assert {row["policy"] for row in read_rows(folder / NAME)} == {"full", "random", "streaming"}
