"""The budget: how many KV pairs a head may hold, and which of them are not up for eviction.

`total` is the most slots that a KV head ever holds, in any policy, the new token included. Sinks
(the first tokens of a sequence) and the window (its newest tokens) are protected; what is left,
`topk`, goes to the highest scores.
"""

from dataclasses import dataclass

from kvpolicies.errors import UserError

SINKS = 4
WINDOW = 32


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

    def __post_init__(self) -> None:
        for name in ("total", "sinks", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UserError(f"budget: {name} must be a whole number >= 0, got {value!r}")
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

    @classmethod
    def parse(
        cls,
        text: "str | int | Budget",
        *,
        length: int | None = None,
        sinks: int | None = None,
        window: int | None = None,
    ) -> "Budget":
        """Reads `"1024"` (slots) or `"25%"` (of `length` = prompt + max_new_tokens, rounded up).

        Without `window`, small budgets get a smaller one than the default 32: a quarter of `total`.

        Raises:
            ValueError: for text that is neither, a ratio without `length`, or an impossible budget.
        """
        if isinstance(text, Budget):
            return text
        total = _slots(str(text).strip(), length)
        sinks = SINKS if sinks is None else sinks
        window = min(WINDOW, total // 4) if window is None else window
        return cls(total, sinks, window)


@dataclass(frozen=True)
class Grant(Budget):
    """A budget in force under a paper's own rule, where that holds more than was asked for.

    `total` stays the most slots ever held.

    Raises:
        ValueError: as `Budget`.
    """

    asked: int = 0
    """Slots that the study gave."""
    prompt: int = 0
    """Tokens of the prompt."""
    in_chunks: bool = False
    """Long prompts are evicted in chunks, as under any budget; else the rule says how much goes."""

    @property
    def chunk(self) -> int:
        """Tokens processed at once when a prompt is longer than the budget."""
        return super().chunk if self.in_chunks else 1


def is_ratio(text: "str | int | Budget") -> bool:
    """True for budgets such as `"25%"`, whose slots depend on a sequence's length."""
    return isinstance(text, str) and text.strip().endswith("%")


def _slots(text: str, length: int | None) -> int:
    try:
        if not text.endswith("%"):
            return int(text)
        ratio = float(text[:-1]) / 100
    except ValueError:
        raise UserError(
            f"budget {text!r}: expected a number of slots such as 1024, or a ratio such as 25%"
        ) from None
    if length is None:
        raise UserError(f"budget {text!r}: a ratio needs a length (prompt + max_new_tokens)")
    if not 0 < ratio <= 1:
        raise UserError(f"budget {text!r}: a ratio must be above 0 % and at most 100 %")
    return -int(-ratio * length // 1)
