"""What an analysis is asked: one frozen dataclass is the YAML, the options, the provenance."""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvpolicies import room
from kvpolicies.budget import BudgetSpec
from kvpolicies.config import DTYPES
from kvpolicies.errors import UserError
from kvpolicies.models.form import Form
from kvpolicies.options import option

DEFINITIONS = ("top-k", "weighted")
COUNTED = "counted"
"""Stands in run.json for a profile's file."""


@dataclass(frozen=True)
class Revisit(Form):
    """Everything that decides the numbers, and where they go (`out`)."""

    model: str | None = option(
        None, "embedded, smollm2, a hub id, a folder, gguf:FILE; default: the study's, or embedded"
    )
    traces: str = option(
        "ledger",
        "ledger; JSON lines with id, problem, solution; or a study's folder (what full wrote)",
    )
    policies: tuple[str, ...] = option(
        ("streaming", "snapkv", "rpc", "h2o", "rkv", "beacon"),
        "whose losses are counted; full alone: nobody's",
    )
    budgets: tuple[str, ...] = option(
        ("25%", "50%"), "slots (133) or shares of prompt + new tokens (25%%)"
    )
    problems: int = option(6, "traces at most", least=1)
    skip: int = option(0, "so many problems of the traces are passed over first", least=0)
    length: int = option(412, "ledger: tokens of prompt and trace, 50 to 900", least=50)
    max_new_tokens: int | None = option(None, "traces are cut behind so many new tokens", least=2)
    k: int = option(150, "most attended keys of a query whose distance is looked at", least=1)
    distance: float = option(
        200.0, "a query is global if their mean distance exceeds this", above=0
    )
    definition: str = option(
        "top-k",
        "top-k: plain mean over the K keys; weighted: by attention, over all keys",
        choices=DEFINITIONS,
    )
    scale_below: int = option(
        2048, "for shorter traces k and distance shrink in proportion; 0 = never", least=0
    )
    sinks: int = option(
        4, "first tokens left out of distances and revisits: all policies keep them", least=0
    )
    head: str | None = option(
        None, "LAYER.HEAD (a query head) of the queries' picture; default: the most mixed"
    )
    queries: int = option(256, "queries in that picture, at most", least=2)
    batch_size: int = option(
        8, "traces that a policy decodes together: a kill loses so many", least=1
    )
    seed: int = option(0, "of the random policy and of the bootstrap", least=0)
    dtype: str = option("float32", f"of weights and cache: {', '.join(DTYPES)}", choices=DTYPES)
    device: str = option("auto", "auto, cpu, cuda")
    profile: str = option(
        "", "count the keys that each layer needs, and write its shares to this file (layers:)"
    )
    out: str = option("results/revisit", "folder for revisit.json, CSVs, PNGs, revisit.html")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and not re.fullmatch(r"\d+\.\d+", self.head):
            raise UserError(f"revisit: head reads LAYER.HEAD, such as 3.0, got {self.head!r}")
        if self.traces == "ledger":
            made = self.skip + self.problems
            tokens = made * self.length
            room.check(tokens * room.ENTRY, f"{made:,} ledger problems", "lower problems")
        for name in ("traces", "out"):
            if not getattr(self, name).strip():
                raise UserError(f"revisit: {name} is empty")

    def resolved(self) -> "Revisit":
        """With policies in their canonical spelling, `full` and repetitions gone.

        Raises:
            UserError: as `check`; a value that an option of a policy cannot have.
        """
        from kvpolicies.registry import resolve

        self.check()
        names = dict.fromkeys(str(resolve(name)) for name in self.policies)
        budgets = tuple(dict.fromkeys(BudgetSpec(budget).text for budget in self.budgets))
        policies = tuple(name for name in names if name != "full")
        if policies and not budgets:
            raise UserError("revisit: budgets is empty; give one, or --policies full")
        return replace(self, policies=policies, budgets=budgets)

    def check(self) -> None:
        """Looks at policies and budgets, as far as that needs no torch.

        Raises:
            UserError: an unknown policy, an impossible budget.
        """
        from kvpolicies.registry import check

        for name in self.policies:
            check(name)
        for budget in self.budgets:
            BudgetSpec(budget)

    def meaning(self) -> dict[str, Any]:
        """What must be equal for a run to continue another: all that a trace's row is made of."""
        free = ("problems", "batch_size", "device")
        return {key: value for key, value in self.identity().items() if key not in free}

    def identity(self) -> dict[str, Any]:
        """What run.json keeps: all but where results go."""
        values = {key: value for key, value in asdict(self).items() if key != "out"}
        values["profile"] = COUNTED if self.profile else ""  # wherever it is written
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


@dataclass(frozen=True)
class Rule:
    """What is far, and what is global, in a trace of one length.

    Distances are q - t tokens. The paper (BeaconKV, arXiv 2609.04971) states K = 150 and a mean
    distance of 200 for long traces; how its mean is weighted, and whether it counts the first
    tokens, we could not confirm. Hence two definitions under names of their own, `sinks` as an
    option, and both in every result.
    """

    k: int
    distance: float
    definition: str
    sinks: int

    @classmethod
    def of(cls, config: Revisit, tokens: int) -> "Rule":
        """The rule for a trace of so many tokens: `k` and `distance` shrink with short ones."""
        short = tokens < config.scale_below
        factor = tokens / config.scale_below if short else 1.0
        k = max(1, round(config.k * factor))
        return cls(k, config.distance * factor, config.definition, config.sinks)
