"""Statistics of a model's queries over text: what triattention wants to know of a model."""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvpolicies.adapter import LayerActivations, uncached_forward, watched_dense
from kvpolicies.architecture import find_ropes, inspect_model
from kvpolicies.errors import UserError
from kvpolicies.learned.base import fingerprint
from kvpolicies.learned.statistics import QueryStatistics
from kvpolicies.positions import check_words
from kvpolicies.train import sources
from kvpolicies.train.calibration import Calibration


def texts(asked: Calibration, source: sources.Source) -> list[list[int]]:
    """Token ids of the documents, the first of a seeded order, cut to `length`.

    Raises:
        UserError: if none has two tokens.
    """
    found = (text[: asked.length] for text in islice(_all(source), asked.documents))
    if texts := [text for text in found if len(text) > 1]:
        return texts
    raise UserError(f"data {asked.data}: no document of two tokens or more")


def _all(source: sources.Source) -> Iterator[list[int]]:
    """An epoch's documents."""
    seen = 0
    for _ in count():
        block = source.block(0, seen)
        if not block:
            return
        yield from block
        seen += len(block)


@torch.no_grad()
def calibrate(model: Any, texts: list[list[int]]) -> QueryStatistics:
    """The statistics of a model's queries over texts; shows progress.

    Sums are float64. Each text is one dense forward: memory grows with the longest.

    Raises:
        UserError: for a model that is not supported, or a token that it does not have.
    """
    shape = inspect_model(model)
    layers = tuple(y for y, span in enumerate(shape.spans) if span is None)
    ropes, total = find_ropes(model), sum(map(len, texts))
    sums: dict[int, tuple[Tensor, Tensor]] = {}

    def see(seen: LayerActivations) -> None:
        rope, (_, _, _, t, _) = ropes[seen.layer], seen.queries.shape
        rope.prepare(t, seen.queries.device)
        raw = rope.unrotate(seen.queries, torch.arange(t, device=seen.queries.device)[None])
        both = [x[0].double().sum(dim=2) for x in (raw, rope.sizes(raw))]
        old = sums.get(seen.layer, (0.0, 0.0))
        sums[seen.layer] = (old[0] + both[0], old[1] + both[1])  # type: ignore[assignment]

    device = next(model.parameters()).device
    forward = uncached_forward(model)
    with tqdm(total=total, desc="calibrate", unit="token") as bar, watched_dense(model, see):
        for text in texts:
            check_words(model, text, "a document")
            tokens = torch.tensor([text], device=device)
            forward(tokens, torch.arange(len(text), device=device)[None])
            bar.update(len(text))
    mean, size = ({y: (sums[y][i] / total).float().cpu() for y in layers} for i in range(2))
    return QueryStatistics(fingerprint(model), layers, total, mean, size)
