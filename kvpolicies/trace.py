"""Eviction traces: one number per token tells all that a policy did to it.

e[b, layer, h, t] is the position of the first query that no longer sees token t at that KV head;
NEVER if none. Query q sees key t <=> t <= q < e[t]. Convention: attend-then-evict, so a token that
was dropped after query q has e = q + 1.
"""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvpolicies.budget import KV_DTYPES
from kvpolicies.errors import UserError, shown
from kvpolicies.files import naming, writing

NEVER = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class EvictionTrace:
    """Eviction times of B sequences of at most T tokens, with those tokens.

    Raises:
        ValueError: for shapes or dtypes that do not fit together.
    """

    times: Int[Tensor, "B layers H T"]
    """e, int32."""
    tokens: Int[Tensor, "B T"]
    """Token ids, int64; right-padded with -1."""
    prompts: Int[Tensor, "B"] | None = None
    """How many of the tokens are the prompt's; None where nobody said."""
    last: Int[Tensor, "B"] | None = None
    """The new token that was chosen last and never processed: it has no keys."""
    kv_dtype: str = "auto"
    """What keys and values were stored in, and are read back from in a replay."""

    def __post_init__(self) -> None:
        _check(self.times, self.tokens, (self.prompts, self.last), "eviction trace")

    def visible(self, layer: int) -> Bool[Tensor, "B H T T"]:
        """mask[b, h, q, t] of a layer, by its number: query q sees key t."""
        t = torch.arange(self.times.shape[-1], device=self.times.device)
        seen = t[:, None] < self.times[:, layer, :, None, :]
        return seen & (t[None, :] <= t[:, None])

    def kept(self, query: int) -> Bool[Tensor, "B layers H T"]:
        """Which tokens query number `query` sees."""
        t = torch.arange(self.times.shape[-1], device=self.times.device)
        return (t <= query) & (query < self.times)

    def cache_length(self, query: int) -> Int[Tensor, "B layers H"]:
        """Slots held while query number `query` attends."""
        return self.kept(query).sum(-1)

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        every = {name: getattr(self, name) for name in ("times", "tokens", "prompts", "last")}
        tensors = {k: t.contiguous().cpu() for k, t in every.items() if t is not None}
        about = {"format": "kvpolicies.EvictionTrace", "version": "1", "kv_dtype": self.kv_dtype}
        with writing(path) as half:
            save_file(tensors, half, metadata=about)

    @classmethod
    def load(cls, path: str | Path) -> "EvictionTrace":
        """Reads what `save` wrote.

        Raises:
            ValueError: if the file is missing or is no eviction trace.
        """
        with naming(path, "eviction trace", "not readable: "):
            if Path(path).is_dir():  # which safetensors would call no such device
                raise IsADirectoryError(errno.EISDIR, "is a directory")
            tensors = load_file(path)
            with safe_open(path, "pt") as file:
                kv_dtype = (file.metadata() or {}).get("kv_dtype", "auto")
        if kv_dtype not in KV_DTYPES:
            raise UserError(f"eviction trace {path}: not readable: kv_dtype {shown(kv_dtype)}")
        if missing := {"times", "tokens"} - tensors.keys():
            raise UserError(f"eviction trace {path}: not readable: no tensor {sorted(missing)[0]}")
        prompts, last = tensors.get("prompts"), tensors.get("last")
        _check(tensors["times"], tensors["tokens"], (prompts, last), f"eviction trace {path}")
        _check_values(tensors["times"], tensors["tokens"], f"eviction trace {path}")
        return cls(tensors["times"], tensors["tokens"], prompts, last, kv_dtype)

    @classmethod
    def stack(cls, traces: "list[EvictionTrace]") -> "EvictionTrace":
        """Joins traces of different lengths along B; behind a sequence's end lies padding."""
        longest = max(t.times.shape[-1] for t in traces)

        def padded(x: Tensor, fill: int) -> Tensor:
            return torch.nn.functional.pad(x, (0, longest - x.shape[-1]), value=fill)

        def joined(name: str) -> Tensor | None:
            every = [getattr(t, name) for t in traces]
            return None if any(x is None for x in every) else torch.cat(every)

        return cls(
            torch.cat([padded(t.times, NEVER) for t in traces]),
            torch.cat([padded(t.tokens, -1) for t in traces]),
            joined("prompts"),
            joined("last"),
            traces[0].kv_dtype,
        )


def _check_values(times: Tensor, tokens: Tensor, where: str) -> None:
    """Raises UserError for what no decode writes: no token at all, or one that never saw itself."""
    if not tokens.numel():
        raise UserError(f"{where}: holds no tokens")
    real = tokens >= 0
    if (
        bool((tokens < -1).any())
        or bool((real[:, 1:] & ~real[:, :-1]).any())
        or not real[:, 0].all()
    ):
        raise UserError(f"{where}: tokens must be ids >= 0, and -1 behind a sequence's end alone")
    gone = times <= torch.arange(times.shape[-1], dtype=torch.int32)
    if bool((gone & real[:, None, None]).any()):
        raise UserError(f"{where}: a token is evicted before it was there")


def _check(times: Any, tokens: Any, counts: tuple[Any, Any], where: str) -> None:
    """Raises UserError unless shapes, dtypes and values are a trace's; `counts`: prompts, last."""
    if times.dim() != 4 or times.dtype != torch.int32:
        raise UserError(
            f"{where}: times must be [B, layers, H, T] int32, got {list(times.shape)} {times.dtype}"
        )
    whole = (torch.int32, torch.int64)
    if tokens.shape != (times.shape[0], times.shape[3]) or tokens.dtype not in whole:
        raise UserError(
            f"{where}: tokens {list(tokens.shape)} {tokens.dtype} do not fit times "
            f"{list(times.shape)}"
        )
    for name, given in zip(("prompts", "last"), counts, strict=True):
        if given is None:
            continue
        fits = given.shape == tokens.shape[:1] and given.dtype in whole
        if not fits or given.min() < 0:
            raise UserError(f"{where}: {name} must be {tokens.shape[0]} whole numbers >= 0")
    prompts = counts[0]
    if prompts is not None and not (prompts.min() > 0 and prompts.max() <= tokens.shape[1]):
        raise UserError(f"{where}: prompts are as long as 1 token to all of them")
