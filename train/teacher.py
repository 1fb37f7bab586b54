"""One pass of a model over packed documents, layer by layer.

At each full layer what a scorer needs is handed to `learn`: what the scorer reads, and what it
should have known. Nothing of a layer is kept when the next one runs: its queries and keys, and
the graph of its scores, are gone by then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicies.adapter import LayerActivations, uncached_forward, watched_dense
from kvpolicies.architecture import find_ropes
from kvpolicies.head import last_states
from kvpolicies.kernels.retention import document_bounds
from kvpolicies.learned.scorer import Scorer
from kvpolicies.learned.targets import Target
from kvpolicies.positions import check_words
from kvpolicies.rope import Rope


@dataclass(frozen=True)
class LayerFeatures:
    """What a scorer reads of one layer's part of a batch."""

    layer: int
    keys: Tensor
    """[B, H, S, D], as the scorer's features say."""
    values: Tensor
    """[B, H, S, D]."""
    inputs: Tensor | None
    """[B, S, E], for scorers that read the attention's input."""
    documents: Tensor
    """[B, S]."""

    def scores(self, scorer: Scorer) -> Tensor:
        """The scorer's r [B, H, S] of this layer."""
        return scorer.scores(self.layer, self.keys, self.values, self.inputs, self.documents)


@dataclass(frozen=True)
class LabelledFeatures(LayerFeatures):
    """`LayerFeatures`, and what the scorer should have known."""

    targets: Tensor
    """[B, H, S] float32."""
    futures: Tensor
    """[B, S] int32, later queries that each target is a mean of."""


Holds = Callable[[LayerFeatures], Tensor]
"""A student's eviction times [B, H, S] int32 at a layer."""


def positions_in(documents: Tensor) -> Tensor:
    """[B, S] int64: from 0 in each document."""
    at = torch.arange(documents.shape[-1], device=documents.device)
    return at - document_bounds(documents, documents)[0]


class Teacher:
    """A model, and what its scorer wants to see of it.

    Args:
        target: what a scorer should have known.
        needs_input: hand over the attention's inputs.
        unrotated: hand over keys before RoPE.
    """

    def __init__(self, model: Any, target: Target, needs_input: bool, unrotated: bool) -> None:
        self.model, self.target = model, target
        self.needs_input, self.unrotated = needs_input, unrotated
        self._ropes: list[Rope] = []

    @torch.no_grad()
    def teach(
        self,
        tokens: Tensor,
        documents: Tensor,
        learn: Callable[[LabelledFeatures], Any],
        holds: Holds | None = None,
    ) -> None:
        """Runs the model on tokens [B, S] and calls `learn` at each full layer, without gradient.

        Args:
            documents: [B, S] integer, never falling along a row; attention and positions keep to
                each.
            holds: targets are of attention to what this student holds; None = to all.
        """

        def look(lesson: LabelledFeatures, _: LayerActivations) -> None:
            learn(lesson)

        self.run(tokens, documents, look, holds=holds)

    def run(
        self,
        tokens: Tensor,
        documents: Tensor,
        learn: Callable[[LabelledFeatures, LayerActivations], Tensor | None],
        every: bool = False,
        holds: Holds | None = None,
    ) -> Tensor:
        """One pass with gradient, and with attention of its own where `learn` returns some.

        Returns:
            Last logits [B, V], or with `every` what all logits are made of (head.py), [B, S, E].

        Raises:
            UserError: for a token that the model has not.
        """
        positions = positions_in(documents)
        check_words(self.model, [int(tokens.min()), int(tokens.max())], "a document")

        def see(seen: LayerActivations) -> Tensor | None:
            keys = self._features(seen.layer, seen.keys, positions)
            text = (seen.layer, keys, seen.values, seen.inputs, documents)
            expires = holds(LayerFeatures(*text)) if holds else None
            targets = self.target(seen.queries, seen.keys, seen.softmax, documents, expires)
            return learn(LabelledFeatures(*text, *targets), seen)

        with watched_dense(self.model, see, documents, self.needs_input):
            forward = last_states(self.model) if every else uncached_forward(self.model)
            return forward(tokens, positions)

    def _features(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        if not self.unrotated:
            return keys
        if not self._ropes:  # not before: they stay on the device that the model is on now
            self._ropes = find_ropes(self.model)
        self._ropes[layer].prepare(int(positions.max()) + 1, keys.device)
        return self._ropes[layer].unrotate(keys.detach(), positions)
