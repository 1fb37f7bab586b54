"""Runs that diverge, checkpoints that are damaged, finished runs whose scorer is gone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvpolicies.cli import main

pytest.importorskip("lightning")

from kvpolicies.train import checkpoints
from kvpolicies.train.module import Frozen
from tests.train.test_runs import recipe, weights


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "run" / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of five steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("done")
    assert main(["train", str(recipe(folder, steps=5, checkpoint_every=1))]) == 0
    assert names(folder) == ["step=4.ckpt", "step=5.ckpt"]
    return folder


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    """A copy of it, as it was after the last checkpoint and before the end."""
    shutil.copytree(done / "run", tmp_path / "run")
    recipe(tmp_path, steps=5, checkpoint_every=1)
    return tmp_path


def unfinished(folder: Path) -> None:
    """As after a kill behind the last checkpoint."""
    shutil.rmtree(folder / "run" / "scorer")
    file = folder / "run" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "finished": False}))


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        content = content[: len(content) // 2]
    elif how == "flipped":  # a bit in the middle of a tensor: it reads, to another number
        name = torch.load(path)["state_dict"]["scorer.nets.0.first"].numpy().tobytes()[:64]
        content[content.index(name)] ^= 1
    elif how == "empty":
        content = bytearray()
    path.unlink()
    path.mkdir() if how == "folder" else path.write_bytes(content)


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "folder"])
def test_a_damaged_newest_checkpoint(
    done: Path, run: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished(run)
    damage(run / "run" / "checkpoints" / "step=5.ckpt", how)
    assert main(["train", str(run / "recipe.yaml"), "--resume"]) == 0
    said = capsys.readouterr().err
    assert said.count("cannot be read; going on from step=4.ckpt, the one before") == 1
    assert names(run) == ["step=4.ckpt", "step=5.ckpt", "step=5.damaged"]
    for name, tensor in weights(done).items():
        assert torch.equal(tensor, weights(run)[name]), name


def test_no_checkpoint_that_can_be_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished(run)
    for number in (4, 5):
        damage(run / "run" / "checkpoints" / f"step={number}.ckpt", "cut")
    assert main(["train", str(run / "recipe.yaml")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "step=5.ckpt: cannot be read, and no checkpoint before it can" in error


@pytest.mark.parametrize("how", ["gone", "damaged", "older"])
def test_a_finished_run_without_its_scorer_makes_it_anew(
    done: Path, run: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = run / "run" / "scorer"
    if how == "gone":
        shutil.rmtree(scorer)
    elif how == "damaged":
        (scorer / "scorer.safetensors").write_bytes(b"x")
    else:
        values = json.loads((scorer / "config.json").read_text())
        del values["base"]["weights"]
        (scorer / "config.json").write_text(json.dumps(values))
    assert main(["train", str(run / "recipe.yaml")]) == 0
    out = capsys.readouterr()
    assert "made anew from" in out.err and "held out: recall" in out.out
    for name, tensor in weights(done).items():
        assert torch.equal(tensor, weights(run)[name]), name
    config = (done / "run" / "scorer" / "config.json").read_text()
    assert (scorer / "config.json").read_text() == config and '"weights"' in config
    shutil.rmtree(scorer)
    shutil.rmtree(run / "run" / "checkpoints")
    assert main(["train", str(run / "recipe.yaml")]) == 2
    assert "its scorer is gone or damaged, and so are its checkpoints" in capsys.readouterr().err


def test_a_run_that_diverges_keeps_what_was_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Frozen.step

    def diverging(self: Frozen, tokens: Tensor, documents: Tensor) -> tuple[dict, Tensor]:
        parts, loss = step(self, tokens, documents)
        return parts, loss * (float("inf") if self.global_step == 3 else 1.0)

    monkeypatch.setattr(Frozen, "step", diverging)
    path = recipe(tmp_path, steps=5, checkpoint_every=1)
    for _ in range(2):  # once more ends in the same way
        assert main(["train", str(path)]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "training diverged: the gradient is not finite after step 3" in error
        assert f"{tmp_path / 'run' / 'checkpoints' / 'step=2.ckpt'} is from before" in error
        assert "Traceback" not in error and "below lr 0.01" in error
        assert names(tmp_path) == ["step=2.ckpt", "step=3.damaged"]
    assert checkpoints.whole(tmp_path / "run" / "checkpoints" / "step=2.ckpt")
    assert not (tmp_path / "run" / "scorer").exists()


def test_a_scorer_that_judges_nothing_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step's weights are seen by no further step, and by the held-out documents."""

    def spoil(self: Frozen) -> None:
        with torch.no_grad():
            dict(self.scorer.named_parameters())["nets.2.second_bias"].fill_(float("inf"))

    monkeypatch.setattr(Frozen, "on_train_end", spoil)
    assert main(["train", str(recipe(tmp_path, steps=2, checkpoint_every=1))]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "training diverged: a score is not finite after step 2" in error
    assert "step=1.ckpt is from before" in error
    assert not (tmp_path / "run" / "scorer").exists()
    assert not json.loads((tmp_path / "run" / "run.json").read_text())["finished"]


def test_a_scorer_no_better_than_chance_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "keeps no more of what it should than chance does"
    for recall, expected in ((0.31, False), (0.3, True), (float("nan"), True)):
        known = {"figures": {"recall": recall, "chance": 0.3}, "seconds": 1.0}
        monkeypatch.setattr("kvpolicies.train.fit.train", lambda *_, known=known: known)
        assert main(["train", str(recipe(tmp_path))]) == 0
        assert (said in capsys.readouterr().err) == expected


def test_weights_that_are_not_finite_are_no_checkpoint(done: Path, tmp_path: Path) -> None:
    good = done / "run" / "checkpoints" / "step=5.ckpt"
    assert checkpoints.whole(good)
    read = torch.load(good)
    read["state_dict"]["scorer.nets.0.first"][0, 0, 0] = float("nan")
    torch.save(read, tmp_path / "step=6.ckpt")
    assert not checkpoints.whole(tmp_path / "step=6.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "step=7.ckpt")
    assert not checkpoints.whole(tmp_path / "step=7.ckpt")
