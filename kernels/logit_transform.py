"""How a model turns products q.k into attention weights: the scale, and what some models add."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """logits = cap * tanh(scale * q.k / cap), softmax over them and a sink."""

    scale: float
    """Of the products q.k, in most models D ** -0.5."""
    cap: float | None = None
    """Soft limit of the logits (Gemma 2, arXiv 2408.00118); None = no limit."""
    sink: Tensor | None = None
    """[H, G] a learned logit a head that takes weight and gives no value (GPT-OSS)."""

    @property
    def plain(self) -> bool:
        """Nothing but a scale: any attention kernel computes it."""
        return self.cap is None and self.sink is None

    def logits(self, products: Tensor) -> Tensor:
        """Products q.k of any shape, float32, as logits."""
        logits = products if self.scale == 1 else products * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def weights(self, logits: Tensor) -> Tensor:
        """[B, H, G, n, L] logits (masked ones far below) as weights; the sink's share is gone."""
        if self.sink is None:
            return logits.softmax(dim=-1)
        sink = self.sink.float()[None, :, :, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
