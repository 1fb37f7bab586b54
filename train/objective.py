"""What a layer's scores are trained for, and the figures that tell how well they do.

Losses are means over rows of each row's own loss, so that they do not depend on how rows are
spread over devices. The decisions asked about are those of a cache that evicts after it attended,
as ours do: `retain` with window + 1 and topk - 1 (see kernels/retention.py).

dms and trimkv train here on the same targets and the same boundary loss as kvpop, which is not how
their papers train them (by distillation under soft masks). trimkv's policy ranks by age times log
beta; what is trained is -log(-log beta), which orders tokens of one age in the same way.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.learned.boundary import (
    boundary_loss,
    recall,
    regression_loss,
    retained,
    spearman,
    static_priorities,
)
from kvpolicies.learned.kinds import KINDS
from kvpolicies.learned.scorer import Scorer
from kvpolicies.train.recipe import Recipe
from kvpolicies.train.teacher import LabelledFeatures, LayerFeatures

FIGURES = ("recall", "chance", "accuracy", "spearman")


class LossParts(NamedTuple):
    """Parts of one layer's loss, each []; only `loss` has a gradient."""

    loss: Tensor
    boundary: Tensor
    regression: Tensor
    accuracy: Tensor
    """NaN where no row has a pair."""


@dataclass(frozen=True)
class Objective:
    """The recipe's losses of one layer."""

    recipe: Recipe
    """Weights, budgets and targets."""

    def __call__(
        self, scores: Tensor, decay: Tensor | None, lesson: LabelledFeatures, step: int
    ) -> LossParts:
        """The loss at an optimiser step.

        Args:
            scores, decay: of `comparable` and `decay_of`, with their graph.
        """
        recipe = self.recipe
        first = step < recipe.regress_first
        boundary, accuracy = self._boundary(scores, decay, lesson)
        rows = range(len(scores))
        regression = torch.stack([self._regression(scores, lesson, row) for row in rows]).mean()
        weights = (0.0, recipe.regression or 1.0) if first else (recipe.boundary, recipe.regression)
        loss = weights[0] * boundary + weights[1] * regression
        return LossParts(loss, boundary.detach(), regression.detach(), accuracy)

    def _boundary(
        self, scores: Tensor, decay: Tensor | None, lesson: LabelledFeatures
    ) -> tuple[Tensor, Tensor]:
        found = []
        for row in range(len(scores)):
            part = slice(row, row + 1)
            for budget in self.recipe.budgets:
                found.append(
                    boundary_loss(
                        *(scores[part], lesson.targets[part], decay, *sizes(budget)),
                        *(lesson.futures[part], self.recipe.min_future, self.recipe.tau),
                        *(lesson.documents[part], self.recipe.margin),
                    )
                )
        loss = torch.stack([one.loss for one in found]).mean()
        return loss, torch.stack([one.accuracy for one in found]).nanmean()

    def _regression(self, scores: Tensor, lesson: LabelledFeatures, row: int) -> Tensor:
        part = slice(row, row + 1)
        least = self.recipe.min_future
        return regression_loss(scores[part], lesson.targets[part], lesson.futures[part], least)


def sizes(budget: Budget) -> tuple[int, int, int]:
    """(sinks, window, topk) of evict-then-attend, for a cache that attends first."""
    return budget.sinks, budget.window + 1, budget.topk - 1


def decay_of(scorer: Scorer, layer: int) -> Tensor | None:
    """[H] >= 0, how much priorities fall a token; None where the scorer has no such thing."""
    return scorer.age(layer) if scorer.config.ages else None


def comparable(scorer: Scorer, text: LayerFeatures) -> Tensor:
    """[B, H, S]: the scores, as numbers whose differences mean the same everywhere."""
    scores = text.scores(scorer)
    if not KINDS[scorer.config.kind].same_order:
        return -(-scores).clamp_min(1e-30).log()
    return scores


@torch.no_grad()
def held(recipe: Recipe, scorer: Scorer, text: LayerFeatures) -> Tensor:
    """[B, H, S] int32: when a cache of the recipe's one budget would evict each token."""
    priorities = static_priorities(
        comparable(scorer, text), decay_of(scorer, text.layer), text.documents
    )
    return retained(priorities, *sizes(recipe.budgets[0]), text.documents)[1]


@torch.no_grad()
def figures(recipe: Recipe, scorer: Scorer, lesson: LabelledFeatures) -> Tensor:
    """How a layer's scores of one row do: [budgets, H, FIGURES] float64, NaN for what there is not.

    The lesson's targets are those of dense attention whatever `lse` the recipe says, so that
    recalls can be compared. `chance` is the recall of random priorities, `accuracy` .5 where
    decisions are guessed.
    """
    decay, scores = decay_of(scorer, lesson.layer), comparable(scorer, lesson)
    documents, least = lesson.documents, recipe.min_future
    teacher = static_priorities(lesson.targets, decay, documents)
    student = static_priorities(scores, decay, documents)
    g = torch.Generator().manual_seed(lesson.layer)
    random = torch.rand(scores.shape, generator=g).to(scores.device)
    ranks = spearman(scores, lesson.targets, lesson.futures, documents, least)
    tables = []
    for budget in recipe.budgets:
        given = (*sizes(budget), documents, least)
        accuracies = [
            boundary_loss(
                *(scores[:, h : h + 1], lesson.targets[:, h : h + 1]),
                *(None if decay is None else decay[h : h + 1], *sizes(budget)),
                *(lesson.futures, least, recipe.tau, documents),
            ).accuracy
            for h in range(scores.shape[1])
        ]
        columns = (
            recall(student, teacher, *given),
            recall(random, teacher, *given),
            torch.stack(accuracies),
            ranks,
        )
        tables.append(torch.stack([column.double() for column in columns], dim=-1))
    return torch.stack(tables)
