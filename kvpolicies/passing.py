"""What transformers sees of a layer of the cache: the keys and values lie elsewhere (slots.py)."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvpolicies.errors import UserError


class PassingLayer(CacheLayerMixin):
    """Hands new keys and values through to our attention function, and counts their columns."""

    is_sliding = False
    is_croppable = False
    attached = False

    def __init__(self) -> None:
        super().__init__()
        self.columns = 0  # tokens seen, padding included
        self.handed_over = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.attached:
            raise UserError(
                "FixedBudgetCache used outside of kvpolicies.attach: write "
                "`with kvpolicies.attach(model, cache): model.generate(...)`"
            )
        self.is_initialized = self.handed_over = True
        self.columns += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1  # no limit on a sequence: slots are reused

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.columns = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise UserError("FixedBudgetCache: beam search is not supported; use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UserError(
            "FixedBudgetCache: batch_repeat_interleave is not supported; repeat the prompts instead"
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        raise UserError(
            "FixedBudgetCache: batch_select_indices is not supported; make a new cache for the "
            "rows that remain"
        )

    def crop(self, *_: Any) -> None:
        raise UserError(
            "FixedBudgetCache: crop is not supported (assisted generation needs it): evicted "
            "tokens do not come back"
        )
