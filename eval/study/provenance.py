"""run.json: what a run was, on what machine, with which versions; and whether one may continue.

Written before the first result and checked on resume: results that mean different things never
share a folder. A study may grow, by policies, budgets, problems or samples. A run resumed on
another machine, or with other versions, adds an entry to `environments`.
"""

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from kvpolicies.config import from_mapping
from kvpolicies.errors import UserError
from kvpolicies.eval.study import asked
from kvpolicies.eval.study import locks as claims
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.locks import Claims
from kvpolicies.eval.study.results import shards
from kvpolicies.eval.tasks.task import Problem, fingerprint
from kvpolicies.files import make_folder, naming, parts_of, read_json, write_json

NAME = "run.json"


class Asked(Protocol):
    """What a run was asked: a study, an analysis."""

    @property
    def model(self) -> str | None: ...

    @property
    def out(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """What run.json keeps of it."""
        ...

    def meaning(self) -> dict[str, Any]:
        """The part of a record that must be equal for a run to continue another."""
        ...


_KINDS = {
    "study": dict, "problems_fingerprint": str, "problems": int, "model": dict,
    "environments": list,
}  # fmt: skip
_WRITTEN = (".json", ".jsonl", ".html", ".csv", ".tex", ".png", ".lock", ".safetensors")
_PACKAGES = ("kvpolicies", "torch", "transformers", "numpy", "scipy", "sympy")


def check_folder(study: Asked, problems: Sequence[Problem]) -> None:
    """Reads only. Raises UserError if `study.out` holds anything but this study's own results."""
    out = Path(study.out)
    check_makeable(out)
    if not (out / NAME).exists():
        if there := shards(out):
            raise UserError(
                f"--out {out}: holds {there[0].name} without {NAME}; choose another folder"
            )
        return
    try:
        known = read_record(out)
    except UserError as error:
        raise UserError(
            f"--out {out}: {NAME} cannot be read; choose another folder ({error})"
        ) from None
    # Older versions had fewer options: what they did is the default.
    before = {f.name: f.default for f in fields(study)} | known["study"]  # type: ignore[arg-type]
    now = study.meaning()
    changed = [f"{key} ({before.get(key)} -> {now[key]})" for key in now if before[key] != now[key]]
    if known["problems_fingerprint"] != fingerprint(problems[: known["problems"]]):
        changed.append("the problems")
    if changed:
        raise UserError(f"--out {out}: holds another study; different: {', '.join(changed)}")


def read_record(folder: Path) -> dict[str, Any]:
    """run.json of a study or an analysis, with parts of the right kinds.

    Raises:
        UserError: it is not there, no JSON, or no such record.
    """
    where = f"{folder / NAME}: not the record of a study"
    record = parts_of(read_json(folder / NAME), _KINDS, where)
    if not all(isinstance(entry, dict) for entry in record["environments"]):
        raise UserError(f"{where} (its 'environments')")
    asked.read(record, str(folder / NAME))
    return record


def recorded(folder: Path) -> Study:
    """The study that a folder holds: all that it was ever asked.

    Raises:
        UserError: as `read_record`; a value that no study has.
    """
    return from_mapping(Study, read_record(folder)["study"], str(folder / NAME))


def joined(study: Study) -> Study:
    """A resolved study with all that its folder holds already; only the study where it is new.

    Raises:
        UserError: as `recorded`.
    """
    out = Path(study.out)
    return study.joined(recorded(out)) if (out / NAME).exists() else study


def problem_ids(record: dict[str, Any]) -> list[str] | None:
    """Ids of a study's problems; None where an older version did not write them down."""
    ids = record.get("problem_ids")
    right = isinstance(ids, list) and all(isinstance(name, str) for name in ids)
    return ids if right else None


def check_makeable(out: Path, flag: str = "--out") -> None:
    """Refuses, before a model is loaded, a folder of results that cannot be, or not be written to.

    Args:
        flag: the option that named it, the first words of an error.

    Raises:
        UserError: for either; for a folder in it that has the name of a file.
    """
    with naming(out, flag, "cannot be made: "):
        there = next(p for p in (out, *out.absolute().parents) if p.exists())
        inside = [p for p in there.iterdir() if p.is_dir()] if there == out else []
    if not there.is_dir():
        raise UserError(f"{flag} {out}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"{flag} {out}: {there} is not writable")
    if folders := [p.name for p in inside if p.suffix in _WRITTEN]:
        raise UserError(f"{flag} {out}: {folders[0]} is a folder, where a file is to be written")


def open_folder(
    study: Asked,
    problems: Sequence[Problem],
    model_info: dict[str, Any],
    told: dict[str, Any] | None = None,
) -> bool:
    """Makes the folder and writes or extends run.json, in one step.

    Returns:
        whether the study is all that the folder holds. It is not where another process has made
        the folder's study grow meanwhile; then nothing is written.

    Args:
        told: how the model is asked (`asked.describe`).

    Raises:
        UserError: the folder holds another study, or results of other weights or of prompts in
            another form; nothing of it is touched.
    """
    out = Path(study.out)
    make_folder(out, "--out")
    with Claims(out) as held:  # of several processes that start at once, one writes
        held.wait(claims.FOLDER)
        if isinstance(study, Study) and joined(study) != study:
            return False
        check_folder(study, problems)
        _record(out / NAME, study, problems, model_info, told)
    return True


def _record(
    path: Path,
    study: Asked,
    problems: Sequence[Problem],
    model_info: dict[str, Any],
    told: dict[str, Any] | None,
) -> None:
    here = environment()
    record: dict[str, Any] = {
        "study": study.identity(),
        "problems_fingerprint": fingerprint(problems),
        "problems": len(problems),
        "problem_ids": [problem.id for problem in problems],
        "model": model_info,
        asked.KEY: told,
        "environments": [here],
    }
    before = read_record(path.parent) if path.exists() else None
    if before is not None:
        if before["model"] != model_info:
            raise UserError(
                f"--out {path.parent}: its results are those of other weights of {study.model}"
            )
        _check_form(path.parent, asked.read(before, str(path)), told)
        known = before["environments"]
        record["environments"] = known if here in known else [*known, here]
    if record != before:
        write_json(path, record)


def _check_form(out: Path, before: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """Refuses to go on where the same options render prompts in another way than before."""
    for key in ("form", "chat_template"):
        if before and now and before.get(key) != now[key]:
            raise UserError(
                f"--out {out}: its prompts had another {key.replace('_', ' ')}: {before.get(key)}, "
                f"now {now[key]}; choose another folder"
            )


def environment() -> dict[str, Any]:
    """Versions, commit, hardware and threads of this process."""
    import torch

    from kvpolicies.kernels.backend import described

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "kernels": described(torch.device("cuda" if gpu else "cpu")),
    }


def describe_model(model: Any) -> dict[str, Any]:
    """Architecture, size, and a short hash of the weights (of samples of each tensor)."""
    config = model.config
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        whole = getattr(weight, "full_tensor", lambda w=weight: w)()  # spread over processes
        some = whole.detach().flatten()[:: max(1, weight.numel() // 256)]
        digest.update(name.encode() + some.float().cpu().numpy().tobytes())
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "class": type(model).__name__,
        "weights": digest.hexdigest()[:16],
        "parameters": sum(weight.numel() for weight in model.parameters()),
        **{key: getattr(config, key) for key in keys if getattr(config, key, None) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit this code is checked out at, `+changes` if files differ; None if installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
