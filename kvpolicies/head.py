"""A model in two halves: the states behind its last layer, and the logits of some of them.

All logits of a long row are S times the vocabulary; whoever needs them one part after another takes
the states first. What a model does to its logits (soft caps, scales) is its own business: for the
second half it runs as ever, on a decoder that only hands over what it is given.

Only public names of transformers are used here: what changes between releases is adapter.py's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Handed:
    """A decoder's output that holds nothing but its last states."""

    def __init__(self, states: Tensor):
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def last_states(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """(tokens [A, T], positions [A, T]) -> states [A, T, E] that `logits_of` goes on from."""

    def run(tokens: Tensor, positions: Tensor) -> Tensor:
        # Without a padding mask transformers looks, and waits, for packed sequences.
        given = {"input_ids": tokens, "position_ids": positions}
        real = torch.ones_like(tokens)
        output = model.get_decoder()(**given, attention_mask=real, use_cache=False)
        return output.last_hidden_state

    return run


def logits_of(model: Any, states: Tensor) -> Tensor:
    """The model's logits [A, n, V] of states [A, n, E], in its own dtype."""
    with _handing(model.get_decoder(), states):
        blank = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        return model(input_ids=blank, use_cache=False).logits


@contextmanager
def _handing(decoder: Any, states: Tensor) -> Iterator[None]:
    """Makes the decoder answer with `states`, whatever it is asked."""
    decoder.forward = lambda *_, **__: _Handed(states)
    try:
        yield
    finally:
        del decoder.forward
