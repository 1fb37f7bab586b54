"""A training recipe: one frozen dataclass, which is the YAML file and what run.json tells of a run.

    kind: kvpop
    data: my_solutions.jsonl
    columns: [problem, solution]
    model: smollm2
    sequence: 1024
    budget: 256

Everything that can be refused without a model, data or a package is refused here.
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicies import config
from kvpolicies.budget import SINKS, Budget
from kvpolicies.config import load_yaml
from kvpolicies.errors import UserError, nearest
from kvpolicies.learned.config import AGGREGATES, FEATURES, KINDS, LSES
from kvpolicies.models import loading
from kvpolicies.models.form import Form
from kvpolicies.options import option

if TYPE_CHECKING:
    from kvpolicies.learned.targets import Target

RECIPES = Path(__file__).parent / "recipes"
# Each validation runs all of them.
HELD_OUT = 1 << 16
# No weight is of use after a step of that size.
HIGHEST = 1e6
# What may differ between a run and the one that continues it.
FREE = ("out", "devices", "strategy", "device", "workers", "log_every")


@dataclass(frozen=True)
class Recipe(Form):
    """Everything that decides a scorer's weights, and where they go (`out`)."""

    model: str = option("embedded", "embedded, smollm2, a hub id, a folder, or gguf:FILE")
    kind: str = option("kvpop", f"which policy's scorer: {', '.join(KINDS)}", choices=tuple(KINDS))
    recipe: str = option(
        "frozen",
        "frozen: only the scorer trains; distill: the model too",
        choices=("frozen", "distill"),
    )
    data: str = option("ledger", "ledger, JSON lines, a folder, or a hub id")
    split: str = option("train", "of a folder or hub id")
    subset: str = option("", "configuration of a hub id")
    stream: bool = option(False, "read a hub id as it arrives instead of downloading it first")
    columns: tuple[str, ...] = option(
        (), "text columns in order, or one of messages; default: those of known names"
    )
    held_out: int = option(
        16, "the first so many documents validate and never train", least=1, most=HELD_OUT
    )
    sequence: int = option(16384, "tokens of a row, S: whole documents, packed", least=2)
    longer: str = option(
        "cut", "documents longer than a row: cut, or leave_out", choices=("cut", "leave_out")
    )
    batch: int = option(8, "rows of a step, over all devices", least=1)
    accumulate: int = option(1, "parts that a step's rows are run in, one after another", least=1)
    steps: int = option(2000, "optimiser steps", least=1)
    lr: float = option(1e-3, "the scorer's highest learning rate", above=0, most=HIGHEST)
    warmup: int = option(50, "steps in which it rises from 0", least=0)
    schedule: str = option(
        "cosine",
        "how it falls to 0 by the end: cosine, linear; or constant",
        choices=("cosine", "linear", "constant"),
    )
    weight_decay: float = option(1e-4, "of AdamW", least=0)
    betas: tuple[float, ...] = option((0.9, 0.95), "of AdamW")
    clip: float = option(1.0, "largest norm of a step's gradient", above=0)
    budget: tuple[int, ...] = option((1024,), "slots of a KV head; of several the loss is the mean")
    sinks: int = option(SINKS, "first tokens that are never evicted")
    window: int | None = option(None, "newest that are never evicted; default: 32, or budget/4")
    delay: int | None = option(
        None, "w: a token is scored, and its target begins, so many tokens later; default: as it "
        "leaves the window, the smallest of several budgets'", least=1)  # fmt: skip
    boundary: float = option(1.0, "weight of the boundary loss", least=0)
    regression: float = option(0.0, "weight of the squared error to the targets", least=0)
    regress_first: int = option(
        0, "steps at the start that train by the squared error alone", least=0
    )
    margin: bool = option(False, "weigh pairs by how much the teacher's priorities differ")
    tau: float = option(1.0, "temperature of the boundary loss", above=0)
    min_future: int = option(64, "targets of fewer later queries count nowhere", least=1)
    aggregate: str = option(
        "max", "how targets of a group's query heads become one", choices=AGGREGATES
    )
    power: float = option(
        1.0, "of attention in targets: above 1, one strong look outweighs many", least=1
    )
    per_query: bool = option(True, "targets are means over later queries; else sums")
    lse: str = option(
        "dense", "attention in targets: dense, or sparse: of what the scorer keeps", choices=LSES
    )
    memory: int = option(0, "kvpop: rows of the scorer's memory; 0 = head size", least=0)
    hidden: int = option(
        0, "hidden units of kvpop_mlp and trimkv; 0 = the scorer's default", least=0
    )
    features: str = option(
        "post_rope", "keys as the scorer sees them: post_rope, pre_rope", choices=FEATURES
    )
    at_entry: bool = option(False, "kvpop: score a token as it comes (an ablation)")
    ages: bool = option(True, "kvpop, kvpop_mlp: learn a decay of priorities with age")
    base_lr: float = option(
        8e-5, "distill: the model's learning rate, constant", above=0, most=HIGHEST
    )
    kl: float = option(1.0, "distill: weight of the divergence from the teacher's logits", least=0)
    kl_top: int = option(256, "distill: the teacher's so many likeliest tokens count", least=1)
    seed: int = option(0, "of the first weights and of the order of documents", least=0)
    dtype: str = option(
        "float32", "of the model; scorers are always float32", choices=("float32", "bfloat16")
    )
    device: str = option("auto", "auto, cpu, cuda")
    devices: int = option(1, "how many; each runs its share of a step's rows", least=1)
    strategy: str = option("auto", "auto, ddp, fsdp", choices=("auto", "ddp", "fsdp"))
    workers: int = option(0, "processes that prepare rows; 0 = none apart", least=0)
    checkpoint_every: int = option(100, "steps", least=1)
    validate_every: int = option(100, "steps", least=1)
    log_every: int = option(10, "steps", least=1)
    out: str = option("results/train", "folder of checkpoints, logs and the scorer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas must be two numbers in [0, 1), got {list(self.betas)}")
        if self.boundary + self.regression <= 0:
            raise UserError("boundary and regression are both 0: nothing would be learned")
        if self.at_entry and self.kind != "kvpop":
            raise UserError(f"at_entry is an ablation of kvpop, not of {self.kind}")
        asked = "recipe distill" if self.recipe == "distill" else "lse sparse"
        evicts = self.recipe == "distill" or self.lse == "sparse"
        if evicts and not (KINDS[self.kind].same_order and len(self.budget) == 1):
            raise UserError(
                f"{asked} needs one budget, and a kind that orders tokens the same at any age: "
                f"not {', '.join(k for k, declared in KINDS.items() if not declared.same_order)}"
            )
        _check_effect(self)
        loading.check_device(self.device)
        _check_rows(self)
        _check_budgets(self)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """The budgets, with sinks and windows filled in."""
        parts = {"sinks": self.sinks, "window": self.window}
        return tuple(Budget.parse(str(total), **parts) for total in self.budget)

    @property
    def lag(self) -> int:
        """The delay: that of the recipe, or the smallest window of its budgets; at least 1."""
        return self.delay or max(1, min((budget.window for budget in self.budgets), default=1))

    @property
    def target(self) -> "Target":
        """What the scorer learns."""
        from kvpolicies.learned.targets import Target

        return Target(self.lag, self.aggregate, self.power, self.per_query)

    def identity(self) -> dict[str, Any]:
        """What must be equal for a run to continue another."""
        values = {key: value for key, value in asdict(self).items() if key not in FREE}
        values["delay"] = self.lag
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def check_there(recipe: Recipe) -> None:
    """Raises UserError for data that is neither here nor to be looked for on the hub."""
    data = recipe.data
    if not data.strip():
        raise UserError("data is empty: ledger, a file, a folder or a hub id")
    if data != "ledger" and not Path(data).expanduser().exists() and not _is_hub_id(data):
        hint = nearest(data, ["ledger"]) if "/" not in data and "." not in data else ""
        raise UserError(
            f"data {data!r}: no such file or folder; {hint or 'a hub id reads owner/name'}"
        )


def _check_effect(recipe: Recipe) -> None:
    """Refuses options that would change nothing."""
    ledger, distills = recipe.data == "ledger", recipe.recipe == "distill"
    says = {
        **dict.fromkeys(("columns", "subset", "stream", "split"),
                        (not ledger, "data ledger makes its own problems")),
        **dict.fromkeys(("base_lr", "kl", "kl_top"), (distills, "is of recipe distill")),
    }  # fmt: skip
    for name in ("memory", "hidden"):
        kinds = [kind for kind, declared in KINDS.items() if getattr(declared, name)]
        plural = "s" if len(kinds) > 1 else ""
        says[name] = (recipe.kind in kinds, f"is of kind{plural} {' and '.join(kinds)}")
    for option_ in fields(recipe):
        holds, why = says.get(option_.name, (True, ""))
        if not holds and (value := getattr(recipe, option_.name)) != option_.default:
            raise UserError(f"{option_.name} {value!r} has no effect: {why}")


def _is_hub_id(data: str) -> bool:
    """Whether it reads as owner/name."""
    return data.count("/") == 1 and not data.startswith((".", "~", "/")) and ".json" not in data


def _check_rows(recipe: Recipe) -> None:
    parts = recipe.devices * recipe.accumulate
    if recipe.batch % parts:
        raise UserError(
            f"batch {recipe.batch} does not divide into {recipe.devices} devices x "
            f"{recipe.accumulate} parts = {parts}"
        )


def _check_budgets(recipe: Recipe) -> None:
    """Each budget must leave something to decide in a row of S tokens."""
    if not recipe.budget:
        raise UserError("budget: give at least one number of slots")
    for budget in recipe.budgets:
        b, s, w = budget.total, recipe.sequence, recipe.lag
        if w > budget.window:
            raise UserError(
                f"delay {w} is larger than the window of {budget.window} that a budget of {b} "
                "protects: tokens could go before they are scored"
            )
        if budget.topk < 2:
            raise UserError(f"budget {b} leaves {budget.topk} slot to choose; 2 are needed")
        parts = f"{budget.sinks} sinks + {budget.window} window + {budget.topk} chosen"
        if s <= b:
            raise UserError(
                f"sequence {s} is not longer than the budget {b} ({parts}): nothing would ever be "
                "evicted"
            )
        # The first pair is asked at query B, about token B - window - 1.
        future = s - (b - budget.window - 1) - w
        if future < recipe.min_future:
            raise UserError(
                f"sequence {s} leaves {s} - ({b} - {budget.window} - 1) - {w} = {future} later "
                f"queries to the first token in question at budget {b} ({parts}), fewer than "
                f"min_future {recipe.min_future}"
            )


def load_recipe(name: str) -> Recipe:
    """The recipe in a YAML file: a path, or the name of one that ships with the package.

    Raises:
        UserError: no such file, no valid YAML, an unknown key (naming the nearest), a bad value.
    """
    return load_yaml(Recipe, find(name))


def find(name: str) -> Path:
    """The file of a recipe; see `load_recipe`."""
    return config.find_yaml(name, RECIPES, "recipe")


def shipped() -> list[str]:
    """Names of the recipes that come with the package."""
    return config.shipped(RECIPES)
