"""Result rows as a run writes them, made up."""

from __future__ import annotations

from typing import Any


def row(problem: str, **more: Any) -> dict[str, Any]:
    """Of policy random at 8 slots; `more` wins."""
    key = {"policy": "random", "budget": "8", "problem": problem, "sample": 0}
    counts = dict.fromkeys(("length", "slots", "max_slots", "cache_bytes", "state_bytes"), 0)
    return {**key, "finish": "stop", **counts, "seconds": 0, "tokens": [], "text": "", **more}


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what its times were."""
    return {key: value for key, value in row.items() if key not in ("seconds", "processor")}
