"""The budget: how many KV pairs a head may hold, and which of them are not up for eviction.

`total` is the most slots that a KV head ever holds, in any policy, the new token included. Sinks
(the first tokens of a sequence) and the window (its newest tokens) are protected; what is left,
`topk`, goes to the highest scores.
"""

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from kvpolicies import layer_shares
from kvpolicies.errors import UserError

SINKS = 4
WINDOW = 32
KV_DTYPES = ("auto", "bf16", "fp8", "int8", "int4")
"""What keys and values are stored in: as the model makes them, or as kernels/quantise.py says."""
PROMPT = "prompt"
"""Given as sinks: all of a sequence's prompt."""
_LONG = 1 << 20  # tokens: of so many, a share is tried that no length is known for
_SLOTS = re.compile(r"[0-9]+(_[0-9]+)*")
_SHARE = re.compile(r"([0-9]*)(?:\.([0-9]*))? *%")


@dataclass(frozen=True)
class Budget:
    """Slots of one KV head: `total` = `sinks` + `window` + `topk`.

    Raises:
        ValueError: if a number is negative, or if nothing is left for the top-k.
    """

    total: int
    """The most slots a KV head ever holds, the new token included."""
    sinks: int = SINKS
    """First tokens of a sequence, which are never evicted."""
    window: int = WINDOW
    """Newest tokens, which are never evicted."""
    keeps_prompt: bool = False
    """The whole prompt is among the sinks, once it is known (`for_prompt`)."""
    layers: str = layer_shares.EVEN
    """How layers share: `total` is their mean, and in sum exact (layer_shares.py)."""
    kv_dtype: str = "auto"
    """What a slot's key and value are stored in: one of KV_DTYPES."""

    def __post_init__(self) -> None:
        for name in ("total", "sinks", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UserError(f"budget: {name} must be a whole number >= 0, got {value!r}")
        if self.kv_dtype not in KV_DTYPES:
            raise UserError(
                f"budget: kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}"
            )
        if self.topk < 1:
            raise UserError(
                f"budget: total {self.total} leaves no slot to choose: sinks {self.sinks} + window "
                f"{self.window} = {self.sinks + self.window}; total must be larger than that"
            )

    @property
    def topk(self) -> int:
        """Slots that are neither sinks nor window: those that a policy's scores fill."""
        return self.total - self.sinks - self.window

    @property
    def chunk(self) -> int:
        """Tokens processed at once when a prompt is longer than the budget."""
        return max(1, self.topk // 2)

    def for_prompt(self, tokens: int) -> "Budget":
        """The budget of a sequence whose prompt has so many tokens.

        Raises:
            ValueError: if a prompt that is kept leaves nothing for the top-k.
        """
        if not self.keeps_prompt:
            return self
        if tokens + self.window >= self.total:
            raise UserError(
                f"budget: total {self.total} leaves no slot to choose: the prompt's {tokens} "
                f"tokens, which sinks={PROMPT} keeps, + window {self.window} = "
                f"{tokens + self.window}; total must be larger than that"
            )
        return replace(self, sinks=max(self.sinks, tokens), keeps_prompt=False)

    def by_layer(self, count: int) -> "tuple[Budget, ...]":
        """The budget of each of `count` layers that are evicted; their totals' sum is exact.

        Sinks and window are the same in each, and the top-k is shared out, one slot at least to
        each.

        Raises:
            UserError: as `layer_shares.shares_of`.
        """
        shares = layer_shares.shares_of(self.layers, count)
        topks = layer_shares.apportion(count * self.topk, shares)
        own = replace(self, layers=layer_shares.EVEN)
        return tuple(replace(own, total=self.sinks + self.window + k) for k in topks)

    @classmethod
    def parse(
        cls,
        text: "AnyBudget",
        *,
        length: int | None = None,
        sinks: int | str | None = None,
        window: int | None = None,
    ) -> "Budget":
        """Reads `"1024"` (slots) or `"25%"` (of `length` = prompt + max_new_tokens, rounded up);
        `"1024:int8"` says in what they are stored, `"1024:pyramid"` how layers share them.

        `sinks="prompt"` keeps the whole prompt. Without `window`, small budgets get a smaller one
        than the default 32: a quarter of `total`.

        Raises:
            ValueError: for text that is neither, a ratio without `length`, or an impossible budget.
        """
        if isinstance(text, Budget):
            return text
        spec = text if isinstance(text, BudgetSpec) else BudgetSpec(str(text), sinks, window)
        return spec.of(length)


@dataclass(frozen=True)
class BudgetSpec:
    """A budget as it is asked for, before the length of a sequence is known.

    However it is written, one budget has one text: `040` and `4_0` are `40`, `25.0 %` is `25%`.
    Behind colons stand, where they are not `kv_dtype` and `layers`, what keys and values are stored
    in and how layers share the slots: `266:int8`, `133:pyramid`, `266:int8:pyramid`.

    Raises:
        ValueError: for text that is neither a number of slots nor a share, or an impossible budget.
    """

    text: str
    """Slots of a KV head, or a share of prompt + max_new_tokens; more behind colons, as above."""
    sinks: int | str | None = None
    """As of `Budget`; None is 4, `prompt` the whole prompt."""
    window: int | None = None
    """As of `Budget`; None is 32, or a quarter of a small `total`."""
    layers: str | None = None
    """As of `Budget`, for a text that does not say; None is even."""
    kv_dtype: str | None = None
    """As of `Budget`, for a text that does not say; None is auto."""

    def __post_init__(self) -> None:
        amount, *more = self.text.split(":", 1)
        text = ":".join([_normalised(amount), *(part.strip() for part in more)])
        object.__setattr__(self, "text", text)
        layer_shares.check(self.sharing)
        if isinstance(self.sinks, str) and self.sinks != PROMPT:
            raise UserError(
                f"budget: sinks must be a whole number >= 0, or {PROMPT}, got {self.sinks!r}"
            )
        self.of(_LONG)

    @property
    def is_share(self) -> bool:
        """Whether its slots depend on a sequence's length."""
        return self.amount.endswith("%")

    @property
    def amount(self) -> str:
        """Slots or share alone."""
        return self.text.partition(":")[0]

    @property
    def sharing(self) -> str:
        """How layers share: what the text says, else `layers`."""
        return self._said[1] or self.layers or layer_shares.EVEN

    @property
    def stored(self) -> str:
        """What keys and values are stored in: what the text says, else `kv_dtype`."""
        return self._said[0] or self.kv_dtype or KV_DTYPES[0]

    @property
    def _said(self) -> tuple[str, str]:
        """(kv_dtype, layers) as far as the text says; empty where it does not."""
        said = self.text.partition(":")[2]
        first, _, rest = said.partition(":")
        return (first, rest) if first in KV_DTYPES else ("", said)

    def with_total(self, total: int) -> str:
        """The text of so many slots that are shared as this one says."""
        return ":".join([str(total), *self.text.split(":", 1)[1:]])

    def of(self, length: int | None) -> Budget:
        """The budget of a sequence of `length` tokens (prompt + max_new_tokens), rounded up.

        Raises:
            ValueError: a share without a length, or one of which nothing is left to choose.
        """
        if not self.is_share:
            total = int(self.amount)
        elif length is None:
            raise UserError(
                f"budget {self.text!r}: a ratio needs a length (prompt + max_new_tokens)"
            )
        else:
            total = math.ceil(Fraction(self.amount[:-1]) * length / 100)
        window = min(WINDOW, total // 4) if self.window is None else self.window
        keeps = isinstance(self.sinks, str)
        sinks = 0 if isinstance(self.sinks, str) else SINKS if self.sinks is None else self.sinks
        return Budget(total, sinks, window, keeps, self.sharing, self.stored)

    def __str__(self) -> str:
        return self.text


AnyBudget = Budget | BudgetSpec | str | int
"""A budget in any form that `Budget.parse` reads."""


def _normalised(text: str) -> str:
    text = text.strip()
    share = _SHARE.fullmatch(text)
    # No longer text: Python itself reads no such numbers.
    if len(text) > 1000 or not (_SLOTS.fullmatch(text) or (share and any(share.groups()))):
        raise UserError(
            f"budget {text[:80]!r}: expected a number of slots such as 1024, or a ratio such as 25%"
        )
    if not share:
        return text.replace("_", "").lstrip("0") or "0"
    whole, part = share[1].lstrip("0") or "0", (share[2] or "").rstrip("0")
    number = f"{whole}.{part}" if part else whole
    if not 0 < Fraction(number) <= 100:
        raise UserError(f"budget {text!r}: a ratio must be above 0 % and at most 100 %")
    return number + "%"
