"""The recipe `frozen` as a LightningModule: the base model stands still, the scorer trains.

Each layer's loss is differentiated inside the teacher's forward pass, while that layer's keys are
there, and only the gradients of its parameters are kept. The loss that Lightning is given is the
sum of parameter times gradient, whose own gradient is just that: automatic optimisation,
accumulation, DDP and FSDP see an ordinary loss.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor, nn

from kvpolicies.errors import UserError
from kvpolicies.learned.scorer import Scorer
from kvpolicies.train.figures import HeldOutFigures
from kvpolicies.train.objective import LossParts, Objective, comparable, decay_of, figures, held
from kvpolicies.train.recipe import Recipe
from kvpolicies.train.teacher import Holds, LabelledFeatures, LayerFeatures, Teacher


class Pace(NamedTuple):
    """Parameters that learn at one rate."""

    parameters: list[nn.Parameter]
    lr: float
    """The highest rate."""
    share: Callable[[int], float]
    """Of it, at an optimiser step."""


class Diverged(UserError):
    """Training that is of no use any more: the weights after `step` steps gave no finite number."""

    def __init__(self, what: str, step: int):
        super().__init__(f"training diverged: {what} is not finite after step {step}")
        self.step = step


class Frozen(lightning.LightningModule):
    """Trains `scorer` on what `model` attends to.

    The model is no submodule: it is in no checkpoint, and no strategy wraps it.
    """

    def __init__(self, model: Any, scorer: Scorer, recipe: Recipe):
        super().__init__()
        self.scorer, self.recipe = scorer, recipe
        self.objective = Objective(recipe)
        config = scorer.config
        teacher = Teacher(
            model.requires_grad_(False).eval(),
            recipe.target,
            config.needs_input,
            config.features == "pre_rope",
        )
        # In a tuple, so that torch does not take the model for a part of this module.
        self._teacher = (teacher,)
        names = [name for name, _ in scorer.named_parameters()]
        self.names = {
            layer: [n for n in names if n.split(".")[1] == str(layer)] for layer in config.layers
        }
        self.figures = HeldOutFigures(recipe, config)

    @property
    def teacher(self) -> Teacher:
        """The frozen model."""
        return self._teacher[0]

    def on_fit_start(self) -> None:
        """Takes the model to the scorer's device."""
        self.teacher.model.to(self.device)

    on_validation_start = on_fit_start

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        """The surrogate loss of a batch (see above); its value is the loss itself."""
        self.trainer.datamodule.place = tuple(batch["place"].tolist())  # type: ignore[attr-defined]
        parts, surrogate = self.step(batch["tokens"], batch["documents"])
        # Logged on all devices or on none; a batch without a pair decides no better than chance.
        parts["accuracy"] = parts["accuracy"].nan_to_num(0.5)
        for name, value in parts.items():
            self.log(f"train/{name}", value, prog_bar=name in ("loss", "accuracy"), sync_dist=True)
        return surrogate

    def step(self, tokens: Tensor, documents: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """(means over layers of the loss's parts, surrogate loss) of tokens [B, S]."""
        learned = StepLoss()

        def learn(lesson: LabelledFeatures) -> None:
            self.learn(lesson, learned)

        self.teacher.teach(tokens, documents, learn, self.holds)
        return learned.means(), learned.loss()

    @property
    def holds(self) -> Holds | None:
        """What the scorer, as it is now, would keep: for targets of sparse attention."""
        return self._held if self.recipe.lse == "sparse" else None

    def _held(self, text: LayerFeatures) -> Tensor:
        with torch.autocast(text.keys.device.type, enabled=False):
            return held(self.recipe, self.scorer, text)

    def learn(self, lesson: LabelledFeatures, learned: "StepLoss") -> tuple[Tensor, Tensor | None]:
        """Adds a layer's part of the loss to `learned`; returns scores and decay, detached."""
        with torch.enable_grad(), torch.autocast(lesson.keys.device.type, enabled=False):
            scores = comparable(self.scorer, lesson)
            decay = decay_of(self.scorer, lesson.layer)
            self._rankable(score=scores, target=lesson.targets)
            parts = self.objective(scores, decay, lesson, self.global_step)
            # By name: what a strategy has put in a parameter's place counts.
            own = [at(self.scorer, name) for name in self.names[lesson.layer]]
            share = parts.loss / len(self.names)
            grads = torch.autograd.grad(share, own, allow_unused=True)
            learned.add(parts, own, grads)
        return scores.detach(), None if decay is None else decay.detach()

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        """Collects the figures of one held-out row, layer by layer."""
        self.teacher.teach(batch["tokens"], batch["documents"], self.judge)

    def judge(self, lesson: LabelledFeatures) -> None:
        """Adds a layer's figures.

        Raises:
            Diverged: for a score or a target that is not finite.
        """
        self._rankable(score=lesson.scores(self.scorer), target=lesson.targets)
        self.figures.add(lesson.layer, figures(self.recipe, self.scorer, lesson))

    def _rankable(self, **numbers: Tensor) -> None:
        """Tokens are ranked by these, and what is not finite has no rank."""
        for name, tensor in numbers.items():
            if not bool(tensor.isfinite().all()):
                raise Diverged(f"a {name}", self.global_step)

    def on_validation_epoch_end(self) -> None:
        """Means of all devices: logged, and by layer and head kept in `figures`."""
        self.figures.close(lambda x: self.trainer.strategy.reduce(x, reduce_op="sum"), self.device)
        for name, value in self.figures.means().items():
            self.log(f"val/{name}", value, prog_bar=name == "recall", rank_zero_only=True)
        if self.trainer.is_global_zero:
            self.figures.write(self.global_step)

    def paces(self) -> list[Pace]:
        """What trains, and how fast; the rate rises for `warmup` steps and falls by schedule."""
        return [Pace(list(self.parameters()), self.recipe.lr, partial(share, self.recipe))]

    def configure_optimizers(self) -> Any:
        """AdamW at the paces."""
        beta1, beta2 = self.recipe.betas
        paces = self.paces()
        optimiser = torch.optim.AdamW(
            [{"params": pace.parameters, "lr": pace.lr} for pace in paces],
            betas=(beta1, beta2),
            weight_decay=self.recipe.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, [pace.share for pace in paces])
        return {
            "optimizer": optimiser,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """By norm; a sharded module knows how to.

        Raises:
            Diverged: for a norm that is not finite, on all devices alike: nothing was changed yet.
        """
        wrapped = self.trainer.strategy.model
        if hasattr(wrapped, "clip_grad_norm_"):
            norm: Any = wrapped.clip_grad_norm_(self.recipe.clip)  # type: ignore[operator, union-attr]
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.recipe.clip)
        if not math.isfinite(float(norm)):
            raise Diverged("the gradient", self.global_step)


def at(scorer: Scorer, name: str) -> Tensor:
    """What stands now where the parameter of that dotted name was."""
    found: Any = scorer
    for part in name.split("."):
        found = getattr(found, part)
    return found


class StepLoss:
    """What a step has learned, layer by layer: parts of the loss, and their gradients."""

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor]] = []
        self._terms: list[Tensor] = []

    def add(
        self, parts: LossParts, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> None:
        """One layer's parts, and the gradients of its share of the loss."""
        self._parts.append({k: v.detach() for k, v in parts._asdict().items()})
        for parameter, grad in zip(parameters, grads, strict=True):
            self._terms.append((parameter * (0 if grad is None else grad)).sum())

    def means(self) -> dict[str, Tensor]:
        """Over layers."""
        first = self._parts[0]
        return {k: torch.stack([x[k] for x in self._parts]).nanmean() for k in first}

    def loss(self) -> Tensor:
        """The mean loss, whose gradient is the sum of those that were added."""
        surrogate = torch.stack(self._terms).sum()
        return surrogate - surrogate.detach() + self.means()["loss"]


def share(recipe: Recipe, step: int) -> float:
    """The share of the highest learning rate that an optimiser step has."""
    warm = min(1.0, (step + 1) / max(1, recipe.warmup))
    done = max(0.0, (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup))
    falls = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    return warm * falls[recipe.schedule]
