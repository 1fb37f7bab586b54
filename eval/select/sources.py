"""Study folders that a choice is made from: what each ran, and whether they go together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicies.config import from_mapping
from kvpolicies.errors import UserError, cut, shown
from kvpolicies.eval.study import asked, provenance
from kvpolicies.eval.study.config import Study
from kvpolicies.files import naming, read_json
from kvpolicies.models.form import KEYS as FORM
from kvpolicies.models.form import Form

_SHARED = (
    "model",
    "dtype",
    "temperature",
    "top_p",
    "top_k",
    "sinks",
    "window",
    "layers",
    "kv_dtype",
)
"""What a deployment has one of, so that all folders must agree."""
_OWN = ("out", "policies", "budgets", "batch_size", "device", "data", *FORM)
"""What studies of one bench may differ in; of the form, what is in effect is compared."""


@dataclass(frozen=True)
class StudyFolder:
    """A study folder: what it ran, on which code and which problems."""

    folder: str
    study: Study
    commits: tuple[str, ...]
    fingerprint: str
    """Of the problems."""
    problems: int
    weights: str
    """A short hash of the model's."""
    told: dict[str, Any] | None
    """How the model was asked (asked.py); None of a folder that does not say."""
    problem_ids: list[str] | None = None
    """The problems' names; None where an older version did not write them down."""

    @property
    def form(self) -> Form | None:
        """How its prompts were rendered."""
        return None if self.told is None else Form(**self.told["form"])


def read_source(folder: Path) -> StudyFolder:
    """What a folder's run.json says.

    Raises:
        UserError: no study there, or one that grades no answers or charges state to the budget.
    """
    record = _record(folder)
    where = str(folder / provenance.NAME)
    study, count = from_mapping(Study, record["study"], where), record["problems"]
    if count < 1 or isinstance(count, bool):
        raise UserError(f"{where}: problems must be a whole number above 0, got {shown(count)}")
    weights = record["model"].get("weights")
    if not isinstance(weights, str):
        raise UserError(f"{where}: not the record of a study (its model's 'weights')")
    commits = dict.fromkeys(str(entry.get("commit")) for entry in record["environments"])
    fingerprint, told = record["problems_fingerprint"], asked.read(record, where)
    if study.charge_state:
        raise UserError(
            f"{folder}: its policies paid for their state in slots (charge_state), "
            "which no deployment does; run the study without"
        )
    if study.entry.forced:
        raise UserError(
            f"{folder}: task {study.task} grades no answers, so it has no accuracy "
            "to choose by; give a study of a task that generates"
        )
    ids = provenance.problem_ids(record)
    return StudyFolder(str(folder), study, tuple(commits), fingerprint, count, weights, told, ids)


def _record(folder: Path) -> dict[str, Any]:
    path = folder / provenance.NAME
    with naming(folder, "study folder"):
        if not folder.is_dir():
            raise UserError(f"study folder {cut(str(folder))}: no such folder")
        there = path.exists()
    if not there:
        raise UserError(f"{folder}: holds no {provenance.NAME}; not the --out of a study")
    if isinstance(record := read_json(path), dict) and "bench" in record:
        raise UserError(f"{folder}: holds a bench, which measures no accuracy; give a study")
    return provenance.read_record(folder)


def check_alike(sources: list[StudyFolder], model: str | None) -> None:
    """Raises UserError unless all measured one model, `model` if given, under one sampling."""
    first = sources[0]
    for source in sources:
        if model is not None and source.study.model != model:
            raise UserError(f"{source.folder}: measured {source.study.model}, not --model {model}")
        for key in _SHARED:
            mine, theirs = getattr(source.study, key), getattr(first.study, key)
            if mine != theirs:
                raise UserError(
                    f"{source.folder} and {first.folder} differ in {key} ({mine} and "
                    f"{theirs}); a deployment has one"
                )
        if source.form != first.form:
            forms = [one.form.described() if one.form else "unknown" for one in (source, first)]
            raise UserError(
                f"{source.folder} and {first.folder} rendered prompts differently ({forms[0]}; "
                f"{forms[1]}); a deployment has one form"
            )
        if source.weights != first.weights:
            raise UserError(
                f"{source.folder} and {first.folder}: other weights of "
                f"{first.study.model}; measure one of them again"
            )


def check_same_bench(source: StudyFolder, other: StudyFolder) -> None:
    """Raises UserError for the same problems under other conditions."""
    mine, theirs = source.study.identity(), other.study.identity()
    unlike = [key for key in mine if key not in _OWN and mine[key] != theirs[key]]
    if unlike:
        raise UserError(
            f"{source.folder} and {other.folder}: the same problems under other "
            f"conditions ({', '.join(unlike)}); give one of them"
        )
