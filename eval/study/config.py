"""A study: which policies meet at which budgets, on which problems, with which model.

One frozen dataclass is the YAML file, the command line's options and the provenance in run.json.
What is left at its default is filled in by `resolved`: what the task offers, and every policy that
is registered.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicies import config, room
from kvpolicies.budget import KV_DTYPES, BudgetSpec
from kvpolicies.config import DTYPES, Deployment, from_mapping, read_yaml
from kvpolicies.errors import UserError
from kvpolicies.eval.study.records import FULL
from kvpolicies.eval.tasks.task import TASKS, Problem, Task, find_task
from kvpolicies.models.form import Form
from kvpolicies.options import option

STUDIES = Path(__file__).parent / "studies"
ALL = "all"
"""Among a study's policies, stands for all that run on the model as they are."""


class Cell(NamedTuple):
    """One policy at one budget; full's budget is called full too."""

    policy: str
    budget: str


@dataclass(frozen=True)
class Study(Form):
    """Everything that decides a study's numbers, and where they go (`out`)."""

    model: str = option(
        "embedded", "embedded, smollm2, a hub id, a local folder, or gguf:FILE (or just FILE.gguf)"
    )
    task: str = option("ledger", f"what to solve: {', '.join(TASKS)}, or a YAML file of yours")
    data: str = option("", "problems as JSON lines; default: the task's set on the hub")
    policies: tuple[str, ...] = option(
        (), "policies with options, or all that run on the model as they are; default: most of them"
    )
    budgets: tuple[str, ...] = option(
        (), "slots (133) or shares of prompt + new tokens (25%%); default: the task's own"
    )
    sinks: int | str | None = option(
        None, "first tokens that are never evicted, or prompt: all of the prompt; default 4"
    )
    window: int | None = option(
        None, "newest tokens that are never evicted; default 32, or budget/4"
    )
    layers: str | None = option(
        None, "how layers share a budget: even, pyramid, or a file of revisit --profile"
    )
    kv_dtype: str | None = option(
        None,
        f"keys and values are stored in: {', '.join(KV_DTYPES)}; default auto, the model's dtype",
        choices=KV_DTYPES,
    )
    problems: int | None = option(
        None, "problems, the first of the data; default: the task's own", least=1
    )
    samples: int = option(1, "samples of each problem (more than one needs a temperature)", least=1)
    length: int = option(412, "ledger: tokens of prompt and trace, 50 to 900")
    max_new_tokens: int | None = option(None, "most new tokens; default: the task's own", least=1)
    batch_size: int | None = option(None, "rows decoded at once; default: the task's own", least=1)
    temperature: float = option(0.0, "0 decodes greedily")
    top_p: float = option(1.0, "nucleus of sampling")
    top_k: int = option(0, "sampling among the k likeliest; 0 = off")
    seed: int = option(0, "of sampling, of the random policy and of the bootstrap")
    dtype: str = option("float32", f"of weights and cache: {', '.join(DTYPES)}", choices=DTYPES)
    device: str = option("auto", "auto, cpu, cuda")
    tensor_parallel: int = option(
        1, "processes that one model is spread over: torchrun --nproc-per-node N", least=1
    )
    charge_state: bool = option(
        False, "policies give up the slots that their own state is worth in bytes"
    )
    texts: int = option(
        8,
        "problems whose evicted tokens are recorded, for texts in the report; 0 for none",
        least=0,
    )
    out: str = option("results/study", "folder for results.jsonl, run.json, report.html, plots")

    def __post_init__(self) -> None:
        from kvpolicies.sampling import Sampling

        super().__post_init__()
        _ = self.entry  # an unknown task, or a fault in its file, is found now
        for name in ("problems", "samples", "max_new_tokens", "batch_size", "tensor_parallel"):
            if (value := getattr(self, name)) is not None:
                room.check(value * room.ENTRY, f"{name} {value:,}", f"lower {name}")
        Sampling(self.temperature, self.top_p, self.top_k, self.seed)
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

    def load(self) -> list[Problem]:
        """The problems, as they are asked.

        Raises:
            UserError: as `Task.load`.
        """
        return self.entry.load(self.problems, self.length, self.data)

    def resolved(self) -> "Study":
        """This study with every default filled in and every policy in its canonical spelling.

        Raises:
            UserError: as `check`; a value that an option of a policy cannot have.
        """
        from kvpolicies.registry import ON_REQUEST, resolve, usable_names

        self.check()
        task = self.entry
        chosen = [resolve(name) for name in self.policies if name != ALL]
        if not self.policies or ALL in self.policies:
            left_out = () if self.policies else ON_REQUEST
            every = [resolve(name) for name in usable_names() if name not in left_out]
            # Of those that need a scorer, the ones that have one for this model.
            chosen += [p for p in every if p.made_for in (None, self.model)]
        names = map(str, chosen)
        budgets = [self.budget_spec(budget).text for budget in self.budgets or task.budgets]
        return replace(
            self,
            policies=tuple(name for name in dict.fromkeys(names) if name != "full"),
            budgets=tuple(dict.fromkeys(budgets)),
            problems=self.problems or task.problems,
            max_new_tokens=self.max_new_tokens or task.max_new_tokens,
            batch_size=self.batch_size or task.batch_size,
        )

    def check(self) -> None:
        """Looks at everything that can be told without torch, whose import takes seconds.

        Raises:
            UserError: an unknown policy, an impossible budget, data missing or not wanted.
        """
        from kvpolicies.registry import check

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
        for name in self.policies:
            if name != ALL:
                check(name)
        for budget in self.budgets or task.budgets:
            self.budget_spec(budget)

    def budget_spec(self, budget: str) -> BudgetSpec:
        """One of the budgets, with the study's sinks, window, layers and bits."""
        return BudgetSpec(budget, self.sinks, self.window, self.layers, self.kv_dtype)

    def identity(self) -> dict[str, Any]:
        """What run.json keeps: all but where it runs and where results go."""
        how = ("out", "tensor_parallel", "texts")
        values = {key: value for key, value in asdict(self).items() if key not in how}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def meaning(self) -> dict[str, Any]:
        """What must be equal for a run to continue another: all that rows are made of.

        Which rows there are is not in it, nor how they are computed. The problems themselves are
        compared by their fingerprint, wherever they lie.
        """
        free = ("policies", "budgets", "problems", "samples", "data", "batch_size", "device")
        return {key: value for key, value in self.identity().items() if key not in free}

    def joined(self, before: "Study") -> "Study":
        """This study with all rows of another beside its own; both are resolved."""
        specs = [before.budget_spec(budget).text for budget in before.budgets]
        return replace(
            self,
            policies=tuple(dict.fromkeys((*before.policies, *self.policies))),
            budgets=tuple(dict.fromkeys((*specs, *self.budgets))),
            problems=max(self.problems or 1, before.problems or 1),
            samples=max(self.samples, before.samples),
        )


def cells(study: Study) -> list[Cell]:
    """Full, once, then every policy at every budget."""
    return [Cell(FULL, FULL)] + [Cell(p, b) for p in study.policies for b in study.budgets]


def load_study(name: str) -> Study:
    """The study in a YAML file: a path, or the name of one that ships with the package.

    Raises:
        UserError: as `read_study`; an unknown key (naming the nearest), a bad value.
    """
    values, path = read_study(name)
    return from_mapping(Study, values, path)


def read_study(name: str) -> tuple[Any, str]:
    """(keys and values, path) of a study's file, to be checked with the options that go with it.

    A deployment's file (one `policy` at one `budget`) is read too: that policy against full.

    Raises:
        UserError: no such file, no valid YAML; of a deployment's file, an unknown key, or a bad
            value of a key that no study has.
    """
    path = config.find_yaml(name, STUDIES, "study")
    values = read_yaml(path)
    if isinstance(values, Mapping) and {"policy", "budget"} & set(values):
        values = _of_deployment(values, str(path))
    return values, str(path)


def _of_deployment(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A deployment's keys and values, its defaults filled in, as those of a study."""
    defaults = {f.name: f.default for f in fields(Deployment)}
    shared = defaults.keys() & {f.name for f in fields(Study)}
    lists = {"policy": "policies", "budget": "budgets"}
    # Keys that change no result, such as `step`, are checked here; so are those of nobody.
    rest = {key: value for key, value in values.items() if key not in {*shared, *lists}}
    from_mapping(Deployment, rest, where)
    given = {**defaults, **values}
    listed = {name: [given[key]] for key, name in lists.items()}
    return {key: given[key] for key in given if key in shared} | listed


def shipped() -> list[str]:
    """Names of the studies that come with the package."""
    return config.shipped(STUDIES)
