"""Where queries are compared: before or after RoPE, each query head alone or the group as one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.rope import Rope


@dataclass(frozen=True)
class Space:
    """Coordinates of queries, and the points by whose cosines beacons are chosen."""

    name: str
    """`pre_rope`: beacons look from the newest position; `post_rope`: they stay as they were."""
    shared: bool
    """One choice a KV group: cosines are the mean over the group's heads."""

    @property
    def before_rope(self) -> bool:
        """Whether queries are compared before RoPE."""
        return self.name == "pre_rope"

    def raw(self, rope: Rope, queries: Tensor, when: Tensor) -> Tensor:
        """Coordinates of post-RoPE queries [B, H, G, N, D], float32; `when` is position + 1."""
        if not self.before_rope:
            return queries.float()
        return rope.unrotate(queries, (when - 1).clamp_min(0))

    def looking_from(self, rope: Rope, raw: Tensor, positions: Tensor) -> Tensor:
        """`raw` [B, H, G, N, D] as post-RoPE queries that look from `positions` [B, N]."""
        return rope.rotate(raw, positions) if self.before_rope else raw

    def points(self, raw: Tensor) -> Tensor:
        """What to compare by cosine: `raw` itself, or [B, H, 1, N, G * D] for the group as one.

        The unit queries of the G heads, side by side and divided by sqrt(G), make one unit vector;
        the cosine of two of these is the mean of the heads' cosines.
        """
        if not self.shared:
            return raw
        unit = torch.nn.functional.normalize(raw, dim=-1, eps=1e-12) / raw.shape[2] ** 0.5
        return unit.transpose(2, 3).flatten(3)[:, :, None]


def taken(queries: Tensor, index: Tensor) -> Tensor:
    """Entries `index` [B, H, G or 1, m] of `queries` [B, H, G, N, ...], one choice for all heads
    of a group where the index has one."""
    index = index.expand(*queries.shape[:3], -1)
    if queries.dim() == 4:
        return queries.gather(3, index)
    return queries.gather(3, index[..., None].expand(*index.shape, queries.shape[-1]))
