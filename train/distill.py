"""The recipe `distill`, the paper's: the model trains too, under the evictions of its own scorer.

At each full layer the scorer ranks the student's own keys, which tells when each token is evicted,
and the layer attends under that mask. The student learns to predict as the model did before, dense:
the divergence over the teacher's likeliest tokens. The scorer learns the boundary loss on what the
student's queries would attend to, as in `frozen`: no gradient passes through its ranks.

A CPU attends with a mask of S x S booleans a head; a GPU takes FlexAttention's block mask. Of a
row's logits those of PART tokens are there at a time. Source: KVpop, arXiv 2607.05061.
"""

import copy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

from kvpolicies.adapter import LayerActivations
from kvpolicies.head import logits_of
from kvpolicies.kernels.attention import masked_attention
from kvpolicies.learned.boundary import retained, static_priorities
from kvpolicies.learned.mask import block_mask, dense_mask
from kvpolicies.learned.scorer import Scorer
from kvpolicies.train.module import Frozen, Pace, StepLoss, share
from kvpolicies.train.objective import comparable, decay_of, sizes
from kvpolicies.train.recipe import Recipe
from kvpolicies.train.teacher import LabelledFeatures, Teacher

PART = 256


class Distill(Frozen):
    """Trains `model` and `scorer`; a frozen copy of the model, dense, is the teacher."""

    def __init__(self, model: Any, scorer: Scorer, recipe: Recipe):
        super().__init__(copy.deepcopy(model), scorer, recipe)
        self.student = model.requires_grad_(True)
        old = self.teacher
        self._pupil = (Teacher(model, old.target, old.needs_input, old.unrotated),)

    def step(self, tokens: Tensor, documents: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """A training step whose loss is the scorer's plus the divergence, `kl` of the parts."""
        learned = StepLoss()

        def attend(lesson: LabelledFeatures, seen: LayerActivations) -> Tensor:
            return self.attention(*self.learn(lesson, learned), lesson.documents, seen)

        states = self._pupil[0].run(tokens, documents, attend, every=True, holds=self.holds)
        kl = self.divergence(states, tokens, documents)
        means, weighted = learned.means(), self.recipe.kl * kl
        parts = {**means, "kl": kl.detach(), "loss": means["loss"] + weighted.detach()}
        return parts, learned.loss() + weighted

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        """The student's figures, and its divergence, under its own evictions."""

        def attend(lesson: LabelledFeatures, seen: LayerActivations) -> Tensor:
            self.judge(lesson)
            scores, decay = comparable(self.scorer, lesson), decay_of(self.scorer, lesson.layer)
            return self.attention(scores, decay, lesson.documents, seen)

        tokens, documents = batch["tokens"], batch["documents"]
        states = self._pupil[0].run(tokens, documents, attend, every=True)
        kl = self.divergence(states, tokens, documents)
        self.log("val/kl", kl, sync_dist=False, rank_zero_only=True, batch_size=1)

    def attention(
        self, scores: Tensor, decay: Tensor | None, documents: Tensor, seen: LayerActivations
    ) -> Tensor:
        """[B, H, G, S, D]: the layer's attention to what a cache of the budget would still hold."""
        priorities = static_priorities(scores, decay, documents)
        budget = self.recipe.budgets[0]
        expires = retained(priorities, *sizes(budget), documents)[1]
        queries, keys, values = seen.queries, seen.keys, seen.values
        if not queries.is_cuda or not seen.softmax.plain:
            mask = dense_mask(expires, documents)
            return masked_attention(queries, keys, values, mask, seen.softmax)
        out = _flex()(
            queries.flatten(1, 2),
            keys,
            values,
            block_mask=block_mask(expires, documents, queries.shape[2]),
            scale=seen.softmax.scale,
            enable_gqa=True,
        )
        return out.view_as(queries)

    def divergence(self, states: Tensor, tokens: Tensor, documents: Tensor) -> Tensor:
        """Mean KL from the teacher to the student, over the teacher's `kl_top` likeliest.

        The teacher's probabilities are those among these tokens, the student's among all: what it
        gives to others costs. Padding counts not. Logits are made of PART tokens at a time, and in
        the backward pass once more.

        Args:
            states: [B, S, E], the student's behind its last layer.
        """
        with torch.no_grad():
            dense = self.teacher.run(tokens, documents, lambda *_: None, every=True)
        # A token alone in its document is padding.
        before = torch.nn.functional.pad(documents[:, 1:] == documents[:, :-1], (1, 0))
        real = before | torch.nn.functional.pad(before[:, 1:], (0, 1))
        total = states.new_zeros(len(states), dtype=torch.float32)
        for first in range(0, tokens.shape[1], PART):
            part = slice(first, first + PART)
            log_p, which = self._likeliest(dense[:, part])
            each = checkpoint(
                *(self._apart, states[:, part], log_p, which),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            total = total + (each * real[:, part]).sum(dim=-1)
        return (total / real.sum(dim=-1).clamp_min(1)).mean()

    @torch.no_grad()
    def _likeliest(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(log probabilities among them, which), each [B, n, kl_top], of the teacher's states."""
        logits = logits_of(self.teacher.model, states).float()
        top, which = logits.topk(min(self.recipe.kl_top, logits.shape[-1]), dim=-1)
        return top.log_softmax(dim=-1), which

    def _apart(self, states: Tensor, log_p: Tensor, which: Tensor) -> Tensor:
        """[B, n]: the divergence at each token."""
        logits = logits_of(self.student, states).float()
        log_q = logits.log_softmax(dim=-1).gather(-1, which)
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)

    def paces(self) -> list[Pace]:
        """The scorer goes as in `Frozen`, the model at a constant rate."""
        own = Pace(list(self.scorer.parameters()), self.recipe.lr, partial(share, self.recipe))
        return [own, Pace(list(self.student.parameters()), self.recipe.base_lr, lambda _: 1.0)]


@cache
def _flex() -> Any:
    """FlexAttention, which is only worth its while compiled."""
    return torch.compile(flex.flex_attention, dynamic=False)
