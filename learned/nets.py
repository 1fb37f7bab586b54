"""What the scorers of one layer are made of, and those without a memory.

Each net maps what it sees at tokens d (see `ScorerInput`) to numbers [B, H, S], one for the token
d - lag that is scored then. The one with a memory, kvpop's, lies in scorer.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpolicies.learned.config import ScorerConfig

State = dict[str, Tensor]


@dataclass(frozen=True)
class ScorerInput:
    """What a scorer sees of S tokens, in the dtype of its weights; None where it needs it not.

    `read` are the features of the tokens that are scored, `lag` places before those written; where
    there is none yet, anything may stand.
    """

    written: Tensor | None = None
    """Features [k; v] of the tokens, [B, H, S, 2 D]."""
    read: Tensor | None = None
    """[B, H, S, 2 D]."""
    inputs: Tensor | None = None
    """The attention's inputs, [B, S, E]."""
    starts: Tensor | None = None
    """Which tokens begin a document, [B, S] bool; None = none but a sequence's first."""


def per_head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [B, H, S, I] times each head's own weight [H, I, O], plus bias [H, O]: [B, H, S, O]."""
    b, h, s, i = x.shape
    rows = x.transpose(0, 1).reshape(h, b * s, i)
    out = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias[:, None], rows, weight)
    return out.view(h, b, s, -1).transpose(0, 1)


def normal(shape: tuple[int, ...], deviation: float) -> nn.Parameter:
    """A parameter drawn from a normal distribution; on the meta device nothing is drawn."""
    drawn = torch.empty(shape)
    # There torch would first load its compiler, which takes seconds.
    return nn.Parameter(drawn if drawn.is_meta else drawn.normal_(0, deviation))


class HeadMLP(nn.Module):
    """kvpop_mlp: [k; v] -> hidden, SiLU -> a number, with weights of its own for every KV head."""

    def __init__(self, config: ScorerConfig):
        super().__init__()
        h, x, hidden = config.heads, 2 * config.head_dim, config.hidden
        self.first = normal((h, x, hidden), x**-0.5)
        self.first_bias = nn.Parameter(torch.zeros(h, hidden))
        self.second = normal((h, hidden, 1), 0.02)
        self.second_bias = nn.Parameter(torch.zeros(h, 1))

    def forward(self, seen: ScorerInput, state: State) -> tuple[Tensor, State]:
        """(scores [B, H, S], state as it was)."""
        assert seen.read is not None
        hidden = F.silu(per_head(seen.read, self.first, self.first_bias))
        return per_head(hidden, self.second, self.second_bias)[..., 0], state


class Adapter(nn.Module):
    """dms: minus the decision logit 100 proj(x) - 5; the logit at token d is about token d - 1."""

    def __init__(self, config: ScorerConfig):
        super().__init__()
        self.proj = nn.Linear(config.input_size, config.heads)
        # The factor of 100 would turn any random start into hard decisions.
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, seen: ScorerInput, state: State) -> tuple[Tensor, State]:
        """(minus the logits [B, H, S], state as it was)."""
        assert seen.inputs is not None
        return 5 - 100 * self.proj(seen.inputs).transpose(1, 2), state


class Gate(nn.Module):
    """trimkv: log beta of the retention gate beta = sigmoid(MLP(x)), one output a KV head."""

    def __init__(self, config: ScorerConfig):
        super().__init__()
        self.first = nn.Linear(config.input_size, config.hidden)
        self.second = nn.Linear(config.hidden, config.heads)
        nn.init.constant_(self.second.bias, 10.0)

    def forward(self, seen: ScorerInput, state: State) -> tuple[Tensor, State]:
        """(log beta [B, H, S], state as it was)."""
        assert seen.inputs is not None
        gate = self.second(F.silu(self.first(seen.inputs)))
        return F.logsigmoid(gate).transpose(1, 2), state
