"""Which files `kvpolicies select` writes, and which it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicies import files
from kvpolicies.budget import Budget
from kvpolicies.config import Deployment, load_yaml
from kvpolicies.eval.select import deploying
from tests.support.selecting import GOOD, select
from tests.support.studies import make_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished: rkv loses 2 of 300 problems, random nearly all. Read it, do not write."""
    return make_study(tmp_path_factory.mktemp("made") / "study", GOOD)


def test_sinks_and_window_of_the_studies_are_deployed(tmp_path, capsys):
    folder = make_study(tmp_path / "study", GOOD, sinks=2, window=5)
    argv = [folder, "--largest-loss", "0.05", "--out", tmp_path / "deploy.yaml"]
    assert select(capsys, *argv)[0] == 0
    config = load_yaml(Deployment, tmp_path / "deploy.yaml")
    assert config.budget_spec.of(None) == Budget(101, 2, 5)
    other = make_study(tmp_path / "other", GOOD, sinks=2)
    status, text = select(capsys, folder, other, *argv[1:], "--force")
    assert status == 2 and "differ in window (None and 5)" in text


def test_nothing_there_is_overwritten(study, tmp_path, capsys):
    out = tmp_path / "deploy.yaml"
    argv = [study, "--largest-loss", "0.05", "--out", out]
    out.write_text("mine")
    status, text = select(capsys, *argv)
    assert status == 2 and "--force" in text and out.read_text() == "mine"
    out.unlink()
    (tmp_path / "selection.json").write_text("mine")
    assert select(capsys, *argv)[0] == 2 and not out.exists()
    assert select(capsys, *argv, "--force")[0] == 0
    assert load_yaml(Deployment, out).policy == "rkv"


def test_another_deployment_file_has_a_record_of_its_own(study, tmp_path, capsys):
    argv = [study, "--largest-loss", "0.05", "--out"]
    assert select(capsys, *argv, tmp_path / "deploy.yaml")[0] == 0
    before = (tmp_path / "selection.json").read_bytes()
    assert select(capsys, *argv, tmp_path / "other.yaml")[0] == 0
    assert (tmp_path / "selection.json").read_bytes() == before
    names = {"deploy.yaml", "selection.json", "other.yaml", "other.selection.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_file_that_cannot_be_moved_into_place_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(ValueError, match="no space left"):
        deploying.write_files({tmp_path / "a": "after"})
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]
