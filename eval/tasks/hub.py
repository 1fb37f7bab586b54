"""Rows of a data set on the hub, or of a folder that looks like one, through `datasets`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicies.errors import UserError
from kvpolicies.options import option

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Hub:
    """Where a task's rows are, unless `data` names a file."""

    id: str = option("", "data set on the hub, or a local folder of parquet, JSON or CSV files")
    subset: str = option("", "its configuration")
    split: str = option("test", "its split")
    revision: str = option("", "commit or tag; pin one, and the problems never change")
    files: tuple[str, ...] = option((), "files of the repository to read instead of its own list")

    def __post_init__(self) -> None:
        kinds = {Path(name).suffix for name in self.files}
        if len(kinds) > 1 or not kinds <= set(_BUILDERS):
            raise UserError(f"files must all be of one kind of {', '.join(_BUILDERS)}")


def rows(task: str, hub: Hub) -> list[tuple[str, Mapping[str, Any]]]:
    """(where, row) of every row, in order; rows without an id get `TASK-NUMBER`.

    Raises:
        UserError: package, network, data set or right of access missing; names `data: FILE`.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"task {task}: reading {hub.id} needs `pip install kvpolicies[hub]`, "
            "or give the problems as data: FILE"
        ) from None
    before = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(**_arguments(hub))
        made = [dict(row) for row in found]
    except Exception as error:  # dozens of kinds, of its own, of the hub and of the network
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"task {task}: {hub.id} cannot be read from the hub ({reason}); "
            "give the problems as data: FILE"
        ) from None
    finally:
        if before:
            datasets.enable_progress_bars()
    if not made:
        raise UserError(f"task {task}: {hub.id} has no rows in split {hub.split}")
    return [
        (f"{hub.id}:{number}", {"id": f"{task}-{number}", **row}) for number, row in enumerate(made)
    ]


def _arguments(hub: Hub) -> dict[str, Any]:
    """For `datasets.load_dataset`."""
    if hub.files:
        root = f"hf://datasets/{hub.id}" + (f"@{hub.revision}" if hub.revision else "")
        if Path(hub.id).is_dir():
            root = hub.id
        files = [f"{root}/{name}" for name in hub.files]
        kind = _BUILDERS[Path(hub.files[0]).suffix]
        return {"path": kind, "data_files": {hub.split: files}, "split": hub.split}
    return {
        "path": hub.id,
        "name": hub.subset or None,
        "split": hub.split,
        "revision": hub.revision or None,
    }
