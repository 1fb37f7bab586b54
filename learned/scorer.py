"""Scorers: what each token is worth to a cache, read once from what the model computes anyway.

    scorer = Scorer(config_for(model, "kvpop", window=256))
    r = scorer.scores(layer, keys, values)              # training: all tokens of [B, H, S, D]
    scorer.save_pretrained("my-scorer")                 # then: kvpop(scorer='my-scorer')

The one file that knows xlstm, whose pure torch mLSTM cell kvpop runs on: `chunkwise_simple` for
many tokens, `recurrent_step_stabilized_simple` for one. Source: KVpop, arXiv 2607.05061; the cell:
xLSTM, arXiv 2405.04517, Eq. 19 to 27, with the gates of arXiv 2503.13427.
"""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpolicies.errors import UserError
from kvpolicies.learned import saving
from kvpolicies.learned.config import ScorerConfig
from kvpolicies.learned.kinds import CHUNK, KINDS
from kvpolicies.learned.nets import ScorerInput, State, normal, per_head
from kvpolicies.registry import load

# Tokens a chunk of the cell; chunks a call, for its backward grows with the square of these.
CHUNKS = 16
CAP = 15.0
# Log of a forget gate that leaves nothing: the cap holds any memory below exp(2 CAP) of what comes.
# Not lower: it enters a running sum of float32, whose digits the gates after it need.
FORGET_ALL = -4 * CAP
# A padding token's input gate: exp(-1e4) is 0.
NO_INPUT = -1e4


@cache
def _backends() -> ModuleType:
    """xlstm's mLSTM cells in plain torch.

    The file is run by itself: `import xlstm` would first look for CUDA's toolkit, and fail on a
    GPU without one, for cells that are not used here.
    """
    try:
        spec = importlib.util.find_spec("xlstm")
    except ValueError:
        spec = None
    folders = spec.submodule_search_locations if spec else None
    file = Path(folders[0], "blocks", "mlstm", "backends.py") if folders else None
    if file is None or not file.is_file():
        raise UserError("kvpop's scorer needs xlstm: pip install kvpolicies[learned]")
    own = importlib.util.spec_from_file_location("xlstm.blocks.mlstm.backends", file)
    assert own is not None and own.loader is not None
    module = importlib.util.module_from_spec(own)
    own.loader.exec_module(module)
    return module


class CellInput(NamedTuple):
    """What the cell is fed of S tokens."""

    q: Tensor
    """Read queries, [B, H, S, M]."""
    k: Tensor
    v: Tensor
    i: Tensor
    """Log of the input gate, [B, H, S]."""
    f: Tensor
    """Logit of the forget gate, [B, H, S]."""

    def part(self, tokens: slice) -> "CellInput":
        """Some of the tokens, as views."""
        return CellInput(*(x[:, :, tokens] for x in self))


def cell(fed: CellInput, state: State | None) -> tuple[Tensor, State]:
    """The mLSTM cell: read-outs h [B, H, S, M], and the state after the last token.

    C <- f C + i k v^T, n <- f n + i k, h = C^T q / max(|n q|, 1), with q scaled by 1 / sqrt(M).
    One token takes xlstm's step, more its chunkwise form. The states are those of the chunkwise
    form: the step scales k where the chunkwise form scales q.

    Args:
        state: memory [B, H, M, M], normaliser [B, H, M], scale [B, H] (the log by which the first
            two are scaled down); None = nothing seen.
    """
    s, size = fed.q.shape[2], CHUNK * CHUNKS
    if s == 1 and state is not None:
        return _step(fed, state)
    outs = []
    for first in range(0, s, size):
        out, state = _chunks(fed.part(slice(first, first + size)), state)
        outs.append(out)
    assert state is not None
    return torch.cat(outs, dim=2) if len(outs) > 1 else outs[0], state


def _step(fed: CellInput, state: State) -> tuple[Tensor, State]:
    root = fed.q.shape[-1] ** 0.5
    # Fresh tensors, for it squeezes them in place. eps = 0: the cap keeps the divisor above 0.
    h, (memory, normaliser, scale) = _backends().recurrent_step_stabilized_simple(
        state["memory"],
        state["normaliser"][..., None],
        state["scale"][..., None, None],
        fed.q / root,
        fed.k * root,
        fed.v.clone(),
        fed.i[..., None],
        fed.f[..., None],
        eps=0.0,
    )
    return h, _state(memory, normaliser[..., 0], scale)


def _chunks(fed: CellInput, state: State | None) -> tuple[Tensor, State]:
    n = fed.q.shape[2]
    chunk = min(CHUNK, n)
    if padding := -n % chunk:
        wide = [F.pad(x, (0, 0, 0, padding)) for x in (fed.q, fed.k, fed.v)]
        i = F.pad(fed.i, (0, padding), value=NO_INPUT)
        fed = CellInput(*wide, i=i, f=F.pad(fed.f, (0, padding), value=-NO_INPUT))
    start = {} if state is None else state
    h, last = _backends().chunkwise_simple(
        *(x.contiguous() for x in fed),
        initial_C=start.get("memory"),
        initial_n=start.get("normaliser"),
        initial_m=start.get("scale"),
        chunk_size=chunk,
        return_last_state=True,
        eps=0.0,
    )
    return h[:, :, :n], _state(*last)


def _state(memory: Tensor, normaliser: Tensor, scale: Tensor) -> State:
    return {"memory": memory, "normaliser": normaliser, "scale": scale[..., 0, 0]}


class MemoryRead(nn.Module):
    """kvpop: a matrix memory a KV head, written with every token, read for the token scored."""

    def __init__(self, config: ScorerConfig):
        super().__init__()
        _backends()  # refused now, if it is not there
        h, x, m = config.heads, 2 * config.head_dim, config.memory
        # Of the written token: key, value, and the two gates, whose weights begin at 0.
        self.write = normal((h, x, 2 * m + 2), x**-0.5)
        self.gate_bias = nn.Parameter(torch.zeros(h, 2))
        self.read = normal((h, x, m), x**-0.5)
        self.head = normal((h, m), 0.02)
        self.head_bias = nn.Parameter(torch.zeros(h))
        with torch.no_grad():
            self.write[..., 2 * m :] = 0
            self.gate_bias[:, 1] = torch.linspace(3, 6, h, device="cpu")

    def forward(self, seen: ScorerInput, state: State | None) -> tuple[Tensor, State]:
        """(scores [B, H, S], state after the last token)."""
        assert seen.written is not None and seen.read is not None
        m = self.head.shape[-1]
        k, v, gates = per_head(seen.written, self.write).split([m, m, 2], dim=-1)
        i, f = (CAP * torch.tanh((gates + self.gate_bias[:, None]) / CAP)).unbind(-1)
        if seen.starts is not None:
            f = f.masked_fill(seen.starts[:, None], FORGET_ALL)
        h, state = cell(CellInput(per_head(seen.read, self.read), k, v, i, f), state)
        # The norm cancels the cell's normaliser: some kernels' gradients rest on that.
        normed = F.rms_norm(h, (m,), eps=1e-6)
        return (normed * self.head[:, None]).sum(-1) + self.head_bias[:, None], state


class Scorer(nn.Module):
    """One net a layer, and an age decay a KV head.

    Raises:
        UserError: for kvpop without xlstm.
    """

    def __init__(self, config: ScorerConfig):
        super().__init__()
        self.config = config
        net = load(KINDS[config.kind].net)
        self.nets = nn.ModuleDict({str(i): net(config) for i in config.layers})
        # softplus(-8) = 3e-4 a token: small beside scores, and not out of training's reach.
        ages = {str(i): torch.full((config.heads,), -8.0) for i in config.layers if config.ages}
        self.ages = nn.ParameterDict(ages)
        # Goes where the weights go: their dtype and device, cheaper than asking them.
        self.like = nn.Buffer(torch.empty(0), persistent=False)

    def age(self, layer: int) -> Tensor:
        """lam [H] >= 0, with gradient: priority(t) = score(t) + lam t."""
        if self.config.ages:
            return F.softplus(self.ages[str(layer)])
        return self.like.new_zeros(self.config.heads)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of what they read."""
        return self.like.dtype

    def features(self, keys: Tensor, values: Tensor) -> Tensor:
        """Keys and values side by side, `[B, H, S, 2 D]`, in the weights' dtype, detached."""
        return torch.cat([x.detach().to(self.dtype) for x in (keys, values)], dim=-1)

    def scores(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        inputs: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """r [B, H, S]: r[t] is token t's score, as a policy reads it `config.lag` tokens later.

        kvpop and kvpop_mlp: higher stays. dms: minus the logit. trimkv: log beta, which a policy
        multiplies with the token's age. Where t + lag lies beyond t's document: 0, no score.

        Args:
            keys: [B, H, S, D], as `config.features` says (post-RoPE: as cached).
            values: [B, H, S, D].
            inputs: [B, S, E], what dms and trimkv read instead.
            documents: [B, S], numbers that do not fall along a row; None = one document a row.
        """
        lag, s = self.config.lag, keys.shape[2]
        if self.config.needs_input:
            assert inputs is not None, f"{self.config.kind} reads the attention's inputs"
            seen = ScorerInput(inputs=inputs.detach().to(self.dtype))
        else:
            x = self.features(keys, values)
            read = F.pad(x, (0, 0, lag, 0))[:, :, :s]
            seen = ScorerInput(x, read, starts=None if documents is None else _starts(documents))
        raw, _ = self.nets[str(layer)](seen, None)
        r = F.pad(raw[:, :, lag:], (0, min(lag, s)))
        if documents is not None and 0 < lag < s:
            whole = F.pad(documents[:, lag:] == documents[:, :-lag], (0, lag))
            r = torch.where(whole[:, None], r, 0.0)
        return r

    def advance(self, layer: int, seen: ScorerInput, state: State) -> Tensor:
        """The step form: r [B, H, n] of the tokens read at n new ones; updates `state` in place.

        `state` holds this sequence's tensors [B, *shape] of `config.state_shapes`.
        """
        raw, after = self.nets[str(layer)](seen, state)
        for name, tensor in state.items():
            tensor.copy_(after[name])
        return raw

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes scorer.safetensors and config.json into `folder`, which is made if need be."""
        saving.write(Path(folder), self.config, self.state_dict())

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "Scorer":
        """The scorer in a local folder, or of a hub id; float32, on the CPU.

        Raises:
            UserError: if it is not there, or not whole.
        """
        folder = saving.find(str(name))
        scorer = without_storage(saving.config_in(folder))  # a config may claim any size
        scorer.load_state_dict(saving.tensors_in(folder, scorer.state_dict()), assign=True)
        scorer.like = nn.Buffer(torch.empty(0), persistent=False)
        return scorer


def without_storage(config: ScorerConfig) -> Scorer:
    """A scorer on torch's meta device: names and shapes, whatever their size.

    Raises:
        UserError: for sizes beyond any memory; for kvpop without xlstm.
    """
    try:
        with torch.device("meta"):
            return Scorer(config)
    except UserError:
        raise
    except (RuntimeError, OverflowError):
        raise UserError(
            f"scorer: {config.heads} heads of {config.head_dim}, memory {config.memory}, hidden "
            f"{config.hidden}: no memory is as large as that"
        ) from None


def _starts(documents: Tensor) -> Tensor:
    """[B, S] bool: where a row's document changes."""
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
