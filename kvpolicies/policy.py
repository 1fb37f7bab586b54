"""The policy contract: what an eviction policy sees, what it answers, and what it declares.

Shapes, here and everywhere:
    B rows of a batch          H KV heads             G query heads per KV head
    C slots allocated a head   L slots filled         T tokens of a forward
    D head size                N observation queries  n tokens processed at once

A policy is a frozen dataclass; everything that changes while decoding lives in the cache: tensors
made by `init_state`, slot-aligned tensors that move with their slots, and a few host counters a
row. So state is per sequence, and is gone when the row is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.options import check_options
from kvpolicies.rope import Rope
from kvpolicies.transfer import counting, on_device

Scores = Float[Tensor, "B H L"]


@dataclass(frozen=True)
class Geometry:
    """The fixed sizes of one layer."""

    rows: int
    """B."""
    heads: int
    """H: KV heads that lie in this process."""
    groups: int
    """G: query heads per KV head."""
    slots: int
    """C: slots allocated a head."""
    head_dim: int
    """D."""
    dtype: torch.dtype
    """Of keys and values."""
    device: torch.device
    """Where they lie."""
    length: int = 0
    """Tokens of the longest sequence, 0 = not known beforehand."""
    first_head: int = 0
    """Number of the first KV head that lies here, of those that tensor parallelism spreads."""


@dataclass(frozen=True)
class Schedule:
    """When a sequence evicts, how much goes then, and what is protected: slots of a KV head."""

    capacity: int
    """The most slots ever held, the new token included."""
    drop: int = 1
    """Slots freed when a new token needs one; 0 = nothing may be evicted."""
    sinks: int = 0
    """First tokens of the sequence, which never go."""
    window: int = 0
    """Newest tokens, which do not go as long as others can."""
    prompt_drop: int = 1
    """Slots freed when a token of the prompt needs one, which are then filled at once."""
    first: int | None = None
    """Slots at which the first eviction takes place; None = `capacity`."""
    growth: int = 0
    """Slots by which that rises with each eviction."""

    @classmethod
    def under(cls, budget: Budget, drop: int = 1, window: int = 0) -> "Schedule":
        """The common rule: evict when `budget.total` slots are full.

        Args:
            drop: slots freed while decoding. window: newest tokens that the policy itself never
                gives up, beyond the budget's window and as far as the budget allows.
        """
        assert not budget.keeps_prompt, "of a budget that keeps the prompt: budget.for_prompt first"
        return cls(
            budget.total,
            drop,
            budget.sinks,
            max(budget.window, window),
            max(drop, budget.chunk),
        )

    @classmethod
    def of_prompt(
        cls, budget: Budget, prompt: int, limit: int, sinks: int = 0, window: int = 0
    ) -> "Schedule":
        """The rule of papers that compress prompts: once it is complete, a prompt goes down to the
        budget, and every new token stays."""
        most = max(prompt, budget.total) + limit
        if prompt <= budget.total:
            return cls(most, drop=0)
        drop = prompt - budget.total
        return cls(most, drop, sinks, window, drop, first=prompt, growth=most)

    @classmethod
    def beside(cls, budget: Budget, every: int, sinks: int = 0, window: int = 0) -> "Schedule":
        """The rule of papers with a buffer of `every` slots beside the budget, emptied at once."""
        return cls(budget.total + every, every, sinks, window, every)

    def full_at(self, evicted: int) -> int:
        """Slots at which the next token needs room, once so many tokens have been evicted."""
        first = self.capacity if self.first is None else self.first
        if not self.growth:
            return first
        return min(self.capacity, first + evicted // self.drop * self.growth)

    def window_beside(self, length: int, n_drop: int) -> int:
        """Newest tokens that stay when `n_drop` of `length` slots must go."""
        return max(0, min(self.window, length - self.sinks - n_drop))


Schedules = Schedule | tuple[Schedule, ...]
"""A sequence's schedule in every layer that is evicted, or one each, in the model's order."""


def each(schedules: Schedules) -> tuple[Schedule, ...]:
    """The different layers' schedules; one that all share is a layer like any other."""
    return (schedules,) if isinstance(schedules, Schedule) else schedules


@dataclass(frozen=True)
class Observation:
    """What one processing step of n tokens shows to a policy (all rows process the same n).

    `weights` and `inputs` are None unless the policy declares that it needs them.
    """

    queries: Float[Tensor, "B H G n D"]
    """Post-RoPE queries."""
    positions: Int[Tensor, "B n"]
    """Their positions in the sequence."""
    weights: Float[Tensor, "B H G n L"] | None = None
    """Attention of each query over the slots, float32 (`needs_attention`)."""
    inputs: Float[Tensor, "B n E"] | None = None
    """The attention block's input, E = hidden size (`needs_input`)."""


@dataclass(frozen=True)
class View:
    """The rows of one layer that a policy is asked about: views into the cache, never copies.

    In `scores` and `evicted` every head of every row has L filled slots; in `observe` rows may be
    shorter than L: see `lengths`.
    """

    geometry: Geometry
    """Sizes of the layer, for all rows of the cache."""
    layer: int
    """Number of the layer in the model."""
    keys: Float[Tensor, "B H L D"]
    """Post-RoPE, unless the policy rerotates; in slot order, which is not that of positions."""
    values: Float[Tensor, "B H L D"]
    """As the keys."""
    positions: Int[Tensor, "B H L"]
    """Each slot's position in the sequence, int32."""
    lengths: list[int]
    """Filled slots of each row."""
    seen: list[int]
    """Tokens processed of each row, evicted ones included."""
    prompts: list[int]
    """How many of these are the prompt: the first ones, positions below this number."""
    schedules: list[Schedule]
    """In force for each row."""
    seeds: list[int]
    """Identity of each row's sequence: the same in any batch."""
    state: Mapping[str, Tensor]
    """The policy's per-row tensors [B, ...]."""
    slot_state: Mapping[str, Tensor]
    """The policy's slot-aligned tensors [B, H, L]."""
    counters: list[dict[str, int]]
    """The policy's host counters, one dict a row, empty when a sequence begins."""
    rope: Rope
    """The model's rotation at this layer."""
    softmax: LogitTransform
    """How the model turns products of queries and keys into attention weights."""
    futures: list[Any]
    """Each row's recording of the run to come (`needs_future`; see recording.py), else None."""
    n_drop: int = 0
    """In `scores`: slots of each head that this eviction frees."""
    output: Float[Tensor, "H G D E"] | None = None
    """The model's output projection of each query head at this layer (`needs_output`)."""

    def of(self, rows: slice) -> "View":
        """This view, of some of its rows."""
        tensors = {name: getattr(self, name)[rows] for name in ("keys", "values", "positions")}
        lists = ("lengths", "seen", "prompts", "schedules", "seeds", "counters", "futures")
        return replace(
            self,
            **tensors,
            **{name: getattr(self, name)[rows] for name in lists},
            state={name: tensor[rows] for name, tensor in self.state.items()},
            slot_state={name: tensor[rows] for name, tensor in self.slot_state.items()},
        )

    @property
    def windows(self) -> list[int]:
        """Newest tokens of each row that this eviction leaves alone."""
        both = zip(self.schedules, self.lengths, strict=True)
        return [s.window_beside(length, self.n_drop) for s, length in both]

    @property
    def free(self) -> list[int]:
        """Slots of each row that this eviction leaves to the scores: neither sinks nor window."""
        kept = [length - self.n_drop for length in self.lengths]
        both = zip(kept, self.schedules, self.windows, strict=True)
        return [max(0, n - s.sinks - window) for n, s, window in both]

    @property
    def contested(self) -> Bool[Tensor, "B H L"]:
        """The slots that this eviction may free."""
        device = self.positions.device
        first = on_device([s.sinks for s in self.schedules], device)
        last = self.newest - on_device(self.windows, device)
        positions = self.positions
        return (positions >= first[:, None, None]) & (positions <= last[:, None, None])

    @property
    def newest(self) -> Int[Tensor, "B"]:
        """Position of each row's last processed token."""
        return on_device(self.seen, self.keys.device) - 1

    def newest_slots(self, n: int) -> Int[Tensor, "B n"]:
        """Slots of each row's n newest tokens, in `observe` of these tokens; alike in all heads."""
        return counting([length - n for length in self.lengths], n, self.keys.device)

    def newest_values(self, n: int) -> tuple[Int[Tensor, "B H n"], Float[Tensor, "B H n D"]]:
        """Slots and values of each row's n newest tokens, in `observe` of these tokens."""
        slots = self.newest_slots(n)[:, None].expand(*self.positions.shape[:2], -1)
        wide = slots[..., None].expand(*slots.shape, self.values.shape[3])
        return slots, self.values.gather(2, wide)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all eviction policies. Higher score = stays.

    A subclass gives `name`, `source` and `scores`, and overrides what it needs of the rest.
    """

    name: ClassVar[str]
    """What specs, tables and files call it."""
    source: ClassVar[str] = ""
    """Paper or origin, one line."""
    evicts: ClassVar[bool] = True
    """False: nothing is ever evicted, and the budget must hold the whole sequence."""
    needs_attention: ClassVar[bool] = False
    """`observe` reads `step.weights`."""
    needs_input: ClassVar[bool] = False
    """`observe` reads `step.inputs`."""
    needs_future: ClassVar[bool] = False
    """Looks ahead in a recorded run of the same tokens: can be evaluated, never deployed."""
    mixes_heads: ClassVar[bool] = False
    """Scores of a KV head depend on a layer's other heads: all must lie in one process."""
    one_set: ClassVar[bool] = False
    """Scores are the same for all KV heads of a layer, whose slots then hold the same tokens."""
    layers_alike: ClassVar[bool] = False
    """Reads nothing of a view that differs from layer to layer but its tensors, so that a decode
    step may show several layers at once, as more rows: for policies that read neither `layer` nor
    `geometry.rows`. Layers of other rotations or softmax are shown apart."""
    needs_output: ClassVar[bool] = False
    """Uses `view.output`, the projection that makes attention's output of values."""
    needs_rope: ClassVar[bool] = False
    """Uses `view.rope`: the adapter must know the model's rotation."""
    whole_prompts: ClassVar[bool] = False
    """`observe` must see the prompt tokens that fit before the next eviction at once, however a
    caller cuts the prompt: they are held back until the row is full or the prompt ends."""
    rerotates: ClassVar[bool] = False
    """Keys are stored before RoPE and rotated at each step to their rank in the cache."""
    slot_tensors: ClassVar[Mapping[str, torch.dtype]] = MappingProxyType({})
    """Slot-aligned tensors [B, H, C] to keep; zero for a new token, moved with its slot."""

    def __post_init__(self) -> None:
        check_options(self, f"{self.name}: ")

    def check_model(self, model: Any) -> None:
        """Looks at the model before anything runs. Default: any will do.

        Raises:
            UserError: if the policy cannot run on it: its scorer is another model's.
        """

    @property
    def made_for(self) -> str | None:
        """The one model, by its name in studies, that this policy runs on as it is; None = any.

        "" stands for none: an option is missing, such as a scorer.
        """
        return None

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """When a sequence under this budget evicts, how much, and what is protected.

        Default: the common rule, one in, one out.

        Args:
            prompt: tokens of its prompt. limit: most new tokens. Both are 0 where they are not
                known; only a paper's own rule (`own_rule`) may depend on them.

        Raises:
            UserError: for a budget that is impossible for this policy.
        """
        return Schedule.under(budget)

    @property
    def own_rule(self) -> bool:
        """Whether `schedule` follows the paper's rule (`faithful=True`), not the common budget."""
        return False

    @property
    def observes(self) -> bool:
        """Whether `observe` does anything."""
        return type(self).observe is not Policy.observe

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """The policy's tensors for all rows, row first: zeros mean "nothing seen"."""
        return {}

    def observe(self, view: View, step: Observation) -> None:
        """Sees each processed step, after its tokens entered the cache. Default: looks away."""

    def scores(self, view: View) -> Scores:
        """Scores [B, H, L] float32 of all cached tokens; the lowest unprotected ones go."""
        raise NotImplementedError

    def evicted(self, view: View) -> None:
        """Called after an eviction, with the view of what was kept. Default: nothing to do."""

    def __str__(self) -> str:
        """The spec that `resolve` reads back: the name, and options that are not the default."""
        options = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(options)})" if options else self.name


MOST_QUERIES = 1 << 16
"""Observation queries that a policy may keep: far beyond use, and still no strain on memory."""


def batched_drop(every: int, budget: Budget) -> int:
    """Slots freed at once by a policy that evicts every `every` tokens under a fixed budget.

    At most an eighth of the budget, and never more than the top-k: a cache that is emptied further
    holds too little on average.
    """
    return max(1, min(every, budget.total // 8, budget.topk))


def check_deployable(policy: Policy) -> None:
    """Raises UserError for a policy that can be evaluated, but not run on what is not yet known."""
    if policy.needs_future:
        raise UserError(
            f"policy {policy} looks ahead in a recorded run and cannot be served; "
            "it is for compare alone"
        )
