"""What the learned policies share: a scorer that is loaded when needed, and scores kept by slot."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.learned import saving
from kvpolicies.learned.base import check_base
from kvpolicies.learned.config import ScorerConfig
from kvpolicies.learned.nets import ScorerInput
from kvpolicies.learned.places import Places
from kvpolicies.learned.scorer import Scorer
from kvpolicies.options import option
from kvpolicies.policy import (
    Geometry,
    Observation,
    Policy,
    Schedule,
    Scores,
    View,
    batched_drop,
)

ASSETS = Path(__file__).parent / "assets"
"""A folder a policy: the scorers of the embedded model that come with the package."""


@dataclass(frozen=True, kw_only=True)
class Learned(Policy):
    """Base of the policies that score each token once, with a trained scorer.

    What is loaded from the folder `scorer` is kept beside the fields and is no part of the policy's
    equality.

    Raises:
        UserError: for `every` below 1; when the scorer is used, if it is not there or not whole.
    """

    slot_tensors = MappingProxyType({"score": torch.float32})
    mixes_heads = True
    precision: ClassVar[torch.dtype] = torch.float32
    """Of the scorer's weights and of what it reads (float32 where a device has no other)."""
    scorer: str = ""
    """A folder (`Scorer.save_pretrained`) or a hub id; empty: the embedded model's own."""
    every: int = option(1, least=1)
    """Tokens between two evictions; at most an eighth of the budget goes at once."""

    @property
    def made_for(self) -> str | None:
        """The embedded model, if its scorer comes with the package and no other is given."""
        if self.scorer:
            return None
        return "embedded" if (ASSETS / self.name / saving.CONFIG).is_file() else ""

    @cached_property
    def folder(self) -> Path:
        """Where the scorer lies; the embedded model's own if none is given.

        Raises:
            UserError: if there is none, or it is not to be had.
        """
        if self.scorer:
            return saving.find(self.scorer)
        if not self.made_for:
            raise UserError(f"no scorer given: {self.name}(scorer='FOLDER')")
        return ASSETS / self.name

    @cached_property
    def config(self) -> ScorerConfig:
        """The scorer's config: sizes, and what it needs; no weights are read.

        Raises:
            UserError: if it is missing or wrong, or of another policy's scorer.
        """
        config = saving.config_in(self.folder)
        if config.kind != self.name:
            raise UserError(
                f"{self.name}: the scorer in {self.scorer} is one of {config.kind}: "
                f"{config.kind}(scorer={self.scorer!r})"
            )
        return config

    def network(self, device: torch.device) -> Scorer:
        """The scorer with its weights: read once for each folder and device.

        Raises:
            UserError: if the files are not there, or not whole.
        """
        if device not in self._networks:
            stamps = tuple(
                file.stat().st_mtime_ns if file.is_file() else 0
                for file in (self.folder / saving.CONFIG, self.folder / saving.WEIGHTS)
            )
            dtype = torch.float32 if device.type == "mps" else self.precision
            self._networks[device] = _loaded(self.folder.resolve(), stamps, device, dtype)
        return self._networks[device]

    @cached_property
    def _networks(self) -> dict[torch.device, Scorer]:
        return {}

    def check_model(self, model: Any) -> None:
        """Refuses a model that the scorer was not made for, and a scorer that is not whole.

        Raises:
            UserError: for either.
        """
        check_base(self.config, model, str(self))
        device = next(model.parameters()).device
        if device.type != "meta":  # where only sizes are asked for
            self.network(device)

    @property
    def scored_after(self) -> int:
        """Tokens after which a token has its score, whatever happens: so long it is protected."""
        return self.config.lag

    def schedule(self, budget: Budget, prompt: int, limit: int) -> Schedule:
        """The common rule, in batches: see `batched_drop`.

        Raises:
            UserError: if tokens could go before they are scored.
        """
        if budget.window < self.scored_after:
            raise UserError(
                f"{self}: a token is scored {self.scored_after} tokens after it came, and must be "
                f"protected until then: the budget's window of {budget.window} is too small"
            )
        return Schedule.under(budget, batched_drop(self.every, budget))

    def init_state(self, geometry: Geometry) -> dict[str, Tensor]:
        """What the scorer carries along a sequence (see `ScorerConfig.state_shapes`)."""
        return {
            name: torch.zeros(geometry.rows, *shape, device=geometry.device)
            for name, shape in self.config.state_shapes.items()
        }

    def observe(self, view: View, step: Observation) -> None:
        """Scores the tokens whose turn it is, and writes the scores to their slots."""
        self._score(view, step.positions, step.inputs)

    def _score(self, view: View, written: Tensor, inputs: Tensor | None = None) -> None:
        """Shows the scorer tokens at `written` [B, n]; those `lag` before get their scores."""
        scorer = self.network(view.keys.device)
        positions = written - self.config.lag  # below 0 where none is old enough
        places = Places(view.positions, positions)
        seen = self._seen(scorer, view, written, inputs, places)
        r = scorer.advance(view.layer, seen, dict(view.state))
        if self.config.ages:
            r = r + scorer.age(view.layer)[:, None] * positions[:, None]
        places.write(view.slot_state["score"], r)

    def _seen(
        self, scorer: Scorer, view: View, written: Tensor, inputs: Tensor | None, places: Places
    ) -> ScorerInput:
        """What the scorer reads; `places` are those of the tokens to be scored."""
        assert inputs is not None, f"{self.name} reads the attention's inputs"
        return ScorerInput(inputs=inputs.to(scorer.dtype))

    def scores(self, view: View) -> Scores:
        """Each token's score plus lam times its position: fixed once read."""
        return view.slot_state["score"]


@lru_cache(maxsize=16)
def _loaded(
    folder: Path, stamps: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Scorer:
    """`stamps`, of the files' times, so that a scorer that was trained on is read anew."""
    return Scorer.from_pretrained(folder).to(device, dtype).requires_grad_(False).eval()
