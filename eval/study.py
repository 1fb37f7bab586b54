"""A study: which policies meet at which budgets, on which problems, with which model.

One frozen dataclass is the YAML file, the command line's options and the provenance in run.json.
What is left at its default is filled in by `resolved`: what the task offers, and every policy that
is registered.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvpolicies import config
from kvpolicies.budget import Budget, is_ratio
from kvpolicies.config import Deployment, from_mapping, option, read_yaml
from kvpolicies.errors import UserError, nearest
from kvpolicies.eval.tasks import TASKS, Task, find_task
from kvpolicies.models.form import KEYS as FORM
from kvpolicies.models.form import Form

STUDIES = Path(__file__).parent / "studies"
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Study(Form):
    """Everything that decides a study's numbers, and where they go (`out`)."""

    model: str = option(
        "embedded", "embedded, smollm2, a hub id, a local folder, or gguf:FILE (or just FILE.gguf)"
    )
    task: str = option("ledger", f"what to solve: {', '.join(TASKS)}, or a YAML file of yours")
    data: str = option("", "problems as JSON lines; default: the task's set on the hub")
    policies: tuple[str, ...] = option(
        (), "policies with options; default: all that run on the model as they are"
    )
    budgets: tuple[str, ...] = option(
        (), "slots (133) or shares of prompt + new tokens (25%%); default: the task's own"
    )
    problems: int | None = option(None, "problems, the first of the data; default: the task's own")
    samples: int = option(1, "samples of each problem (more than one needs a temperature)")
    length: int = option(412, "ledger: tokens of prompt and trace, 50 to 900")
    max_new_tokens: int | None = option(None, "most new tokens; default: the task's own")
    batch_size: int | None = option(None, "rows decoded at once; default: the task's own")
    temperature: float = option(0.0, "0 decodes greedily")
    top_p: float = option(1.0, "nucleus of sampling")
    seed: int = option(0, "of sampling, of the random policy and of the bootstrap")
    dtype: str = option("float32", f"of weights and cache: {', '.join(_DTYPES)}")
    device: str = option("auto", "auto, cpu, cuda")
    tensor_parallel: int = option(
        1, "processes that one model is spread over: torchrun --nproc-per-node N"
    )
    charge_state: bool = option(
        False, "policies give up the slots that their own state is worth in bytes"
    )
    texts: int = option(
        8, "problems whose evicted tokens are recorded, for texts in the report; 0 for none"
    )
    out: str = option("results/study", "folder for results.jsonl, run.json, report.html, plots")

    def __post_init__(self) -> None:
        from kvpolicies.sampling import Sampling

        super().__post_init__()
        _ = self.entry  # an unknown task, or a fault in its file, is found now
        if self.dtype not in _DTYPES:
            raise UserError(f"dtype {self.dtype!r}: {nearest(self.dtype, list(_DTYPES))}")
        for name in ("problems", "samples", "max_new_tokens", "batch_size", "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"study: {name} must be at least 1, got {value}")
        for name in ("seed", "texts"):
            if getattr(self, name) < 0:
                raise UserError(f"study: {name} must be >= 0, got {getattr(self, name)}")
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise UserError(
                "study: temperature must be >= 0 and top_p in (0, 1], got "
                f"{self.temperature} and {self.top_p}"
            )
        Sampling(self.temperature, self.top_p, 0, self.seed)  # too cold is refused now
        if self.samples > 1 and self.temperature == 0:
            raise UserError(
                f"study: {self.samples} samples at temperature 0 would all be the same; "
                "set a temperature, or samples to 1"
            )
        if not self.out:
            raise UserError("study: out must name a folder for the results")

    @cached_property
    def entry(self) -> Task:
        """The task, as its file says when the study is made."""
        return find_task(self.task)

    def resolved(self) -> "Study":
        """This study with every default filled in and every policy in its canonical spelling.

        Raises:
            UserError: an unknown policy, an impossible budget, data missing or not wanted.
        """
        from kvpolicies.registry import policy_names, resolve

        task = self.entry
        if task.needs_data and self.model == "embedded":
            raise UserError(
                f"task {task.name}: the embedded model knows the ledger's words only; "
                "name another with --model, for instance smollm2"
            )
        if task.needs_data and not self.data and not task.hub.id:
            raise UserError(f"task {task.name} needs --data FILE: {task.data_hint}")
        if self.data and not task.needs_data:
            raise UserError(f"task {task.name} makes its own problems; leave --data out")
        chosen = [resolve(name) for name in self.policies]
        # Of those that need a scorer, the ones that have one for this model.
        every = [resolve(name) for name in policy_names()] if not chosen else []
        names = map(str, chosen or [p for p in every if p.made_for in (None, self.model)])
        budgets = tuple(str(budget) for budget in self.budgets) or task.budgets
        for budget in budgets:
            Budget.parse(budget, length=1 << 20 if is_ratio(budget) else None)
        return replace(
            self,
            policies=tuple(name for name in dict.fromkeys(names) if name != "full"),
            budgets=tuple(dict.fromkeys(budgets)),
            problems=self.problems or task.problems,
            max_new_tokens=self.max_new_tokens or task.max_new_tokens,
            batch_size=self.batch_size or task.batch_size,
        )

    def identity(self) -> dict[str, Any]:
        """What must be equal for a run to continue another: all but how and where it runs."""
        how = ("out", "tensor_parallel", "texts")
        values = {key: value for key, value in asdict(self).items() if key not in how}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def load_study(name: str) -> Study:
    """The study in a YAML file: a path, or the name of one that ships with the package.

    A deployment's file (one `policy` at one `budget`) is read too: that policy against full.

    Raises:
        UserError: no such file, no valid YAML, an unknown key (naming the nearest), a bad value.
    """
    path = config.find_yaml(name, STUDIES, "study")
    values = read_yaml(path)
    if not isinstance(values, dict) or not {"policy", "budget"} & set(values):
        return from_mapping(Study, values, str(path))
    deployment = from_mapping(Deployment, values, str(path))
    for key in ("sinks", "window", "top_k"):  # and `step`, `kernels` change no result
        if getattr(deployment, key):
            raise UserError(f"{path}: compare treats all policies alike and takes no {key!r}")
    shared = ("model", "max_new_tokens", "batch_size", "temperature", "top_p", "seed", "dtype",
              "device")  # fmt: skip
    return Study(
        policies=(deployment.policy,),
        budgets=(deployment.budget,),
        **{key: getattr(deployment, key) for key in (*shared, *FORM)},
    )


def shipped() -> list[str]:
    """Names of the studies that come with the package."""
    return config.shipped(STUDIES)
