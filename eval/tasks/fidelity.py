"""Fidelity: how far an evicting policy's predictions move from full's, token by token.

The worked solution is fed to the decode loop instead of sampled tokens (teacher forcing, in decode
order, so that a policy evicts exactly as it would while generating). At every solution token the
policy's next-token distribution is compared with the one full gave there:

    nll   -log p_policy(token), nats, mean over the solution's tokens
    kl    KL(full || policy), nats, mean over the tokens
    top1  share of tokens where both put the same token first

Full's distributions are kept for one unit of problems at a time (T tokens x V words x 4 bytes).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicies.eval.tasks.task import Grades

MOST_BYTES = 1 << 30
"""Of full's distributions held at once; a unit of one problem may exceed it."""


@dataclass
class PredictionScorer:
    """Receives the logits of one forced run; `reference` is full's scorer, None for full itself.

    `forced` are the tokens fed, one list a request, requests numbered as given to `generate`.
    """

    forced: Sequence[Sequence[int]]
    reference: "PredictionScorer | None" = None
    _log_probs: list[list[Tensor]] = field(init=False)
    _terms: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self._log_probs = [[] for _ in self.forced]
        self._terms = [[] for _ in self.forced]

    def on_logits(self, request: int, step: int, logits: Float[Tensor, "V"]) -> None:
        """Takes the logits that predict new token number `step` of `request`."""
        if step >= len(self.forced[request]):
            return
        assert step == len(self._terms[request]), "steps of a request come in order, each once"
        log_probs = logits.float().log_softmax(-1)
        full = log_probs
        if self.reference is None:
            self._log_probs[request].append(log_probs.clone())
        else:
            full = self.reference._log_probs[request][step]
        kl = (full.exp() * (full - log_probs)).sum()
        same = (full.argmax() == log_probs.argmax()).float()
        nll = -log_probs[self.forced[request][step]]
        self._terms[request].append(torch.stack([nll, kl, same]))

    def grades(self, request: int) -> Grades:
        """The means over the tokens of one finished request."""
        terms = torch.stack(self._terms[request]).double().mean(dim=0).tolist()
        return dict(zip(("nll", "kl", "top1"), terms, strict=True))


def split_units(lengths: Sequence[int], most: int, vocabulary: int | None) -> list[range]:
    """Cuts requests of these token counts into blocks, in order, each block at most `most` long.

    With `vocabulary`, a block's distributions also stay within `MOST_BYTES`. The cut depends on
    the study alone, so that a resumed run meets the same blocks.
    """
    blocks, start, held = [], 0, 0
    for index, length in enumerate(lengths):
        size = 4 * length * (vocabulary or 0)
        if index > start and (index - start == most or held + size > MOST_BYTES):
            blocks.append(range(start, index))
            start, held = index, 0
        held += size
    if start < len(lengths):
        blocks.append(range(start, len(lengths)))
    return blocks
