"""What no memory holds is refused in one line, with both numbers, before any of it is allocated."""

from dataclasses import replace

import pytest

import kvpolicies
from kvpolicies import cache, room
from kvpolicies.cli import main
from kvpolicies.errors import UserError
from kvpolicies.eval.study import run
from kvpolicies.eval.study.config import Study
from kvpolicies.models import memory
from tests.support.models import prompts, tiny

SMALL = Study(policies=("random",), budgets=("30",), problems=4, length=50, batch_size=2)


def test_a_machine_has_memory_and_says_how_much():
    there = room.total()
    assert there is not None and there > 1 << 28
    room.check(there, "all of it", "no")
    with pytest.raises(UserError, match=r"^more would take .* this machine has .*: take less$"):
        room.check(there + 1, "more", "take less")


@pytest.mark.parametrize(
    ("count", "text"), [(900, "900 B"), (1536, "1.5 KiB"), (3 << 40, "3 TiB"), (1 << 70, "1.1e+09")]
)
def test_bytes_are_shown_in_a_unit_of_their_size(count, text):
    assert room.shown(count).startswith(text)


def test_a_cache_larger_than_the_machine_is_refused_before_it_is_allocated(monkeypatch):
    def generate(**more):
        return kvpolicies.generate(tiny(), prompts(9), "full", "100%", **more)

    devices, group = set(), cache.SlotGroup

    def spy(geometry, *more):
        devices.add(geometry.device.type)
        return group(geometry, *more)

    monkeypatch.setattr(room, "total", lambda device=None: 1 << 20)
    monkeypatch.setattr(cache, "SlotGroup", spy)
    with pytest.raises(UserError, match=r"cache of 1 rows of 40,009 slots .* this machine has 1 M"):
        generate(max_new_tokens=40_000)
    assert devices == {"meta"}
    with pytest.raises(UserError, match="fits no memory: lower batch_size"):
        generate(max_new_tokens=10**18)
    with pytest.raises(UserError, match="fits no memory"):
        memory.predict(tiny(), "full", "100%", 1, 9, 10**30)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"problems": 10**7, "samples": 10**6, "temperature": 1.0}, "20,000,000,000,000 rows"),
        ({"problems": 10**12}, "lower problems"),
        (
            {"policies": ("random", "tova"), "budgets": ("30", "36", "40"), "problems": 10**8},
            "700,",
        ),
    ],
)
def test_more_rows_than_memory_holds_are_refused_at_once(changes, says):
    with pytest.raises(UserError, match=says) as error:
        run.run_study(replace(SMALL, **changes))
    assert "\n" not in str(error.value)


def test_a_study_whose_reference_does_not_fit_is_refused_before_it_runs(tmp_path, monkeypatch):
    """A machine of 3 MiB holds the embedded model, and no two rows of 412 tokens beside it."""
    monkeypatch.setattr(room, "total", lambda device=None: 3 << 20)
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"full on 2 samples of up to 4.. tokens at once") as error:
        run.run_study(replace(SMALL, length=412, out=str(out)))
    assert "lower max_new_tokens or batch_size" in str(error.value) and not out.exists()


@pytest.mark.parametrize("size", ["1000000000", "1" + "0" * 18, "1" + "0" * 30])
def test_a_bench_says_what_does_not_fit(size, tmp_path, capsys):
    argv = ["bench", "--policies", "full", "--out", str(tmp_path / "out"), "--device", "cpu"]
    for option in ("--new", "--batch-sizes", "--prompt"):
        assert main([*argv, option, size]) == 2
        error = capsys.readouterr().err
        assert "this machine has" in error and len(error.splitlines()) == 1
    assert main([*argv, "--predict-only", "--batch-sizes", "1", "--new", size]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err and not (tmp_path / "out").exists()
