"""`kvpolicies select` as tests call it, on grades that tell or do not."""

from __future__ import annotations

import numpy as np

from kvpolicies.cli import main

LOAD = ["--batch", "4", "--max-tokens", "300"]


def ones(problems: int, wrong: int = 0, samples: int = 1) -> np.ndarray:
    grades = np.ones((problems, samples))
    grades[:wrong] = 0
    return grades


GOOD = {"full": ones(300), "rkv @ 101": ones(300, 2), "random @ 101": ones(300, 280)}


def select(capsys, *argv: object, load: list[str] = LOAD) -> tuple[int, str]:
    """(status, what was printed); errors are one line."""
    capsys.readouterr()
    status = main(["select", *map(str, argv), *load])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err and len(shown.err.splitlines()) == (status == 2)
    return status, " ".join((shown.out + shown.err).split())
