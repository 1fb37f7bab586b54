"""What a model, a policy and a batch take in memory, from the config alone: nothing is allocated.

The cache is laid out by the very code that allocates it, on torch's meta device, which has shapes
and no storage; so the prediction is the allocation. Weights are those of the config's model, built
on the same device. Transient memory of a forward is not in it, but for the logits.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kvpolicies.admission import asked_for, scheduled_layers
from kvpolicies.budget import AnyBudget
from kvpolicies.cache import FixedBudgetCache
from kvpolicies.errors import UserError
from kvpolicies.policy import Policy, each


@dataclass(frozen=True)
class Load:
    """What is run."""

    batch: int
    """Rows decoded at once."""
    prompt: int
    """Tokens of each prompt."""
    new: int
    """New tokens of each row."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a batch under one policy: for all its rows together."""

    batch: int
    """Rows."""
    weights: int
    """The model's, which all rows share."""
    cache: int
    """Keys, values and positions of all layers."""
    state: int
    """The policy's own tensors."""
    logits: int
    """Of one decode step: in the model's dtype, and in float32 for the choice."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.state + self.logits

    @property
    def a_row(self) -> int:
        """What one more sequence takes."""
        return (self.cache + self.state + self.logits) // self.batch


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """The config's causal language model with shapes and without storage.

    Raises:
        UserError: if transformers has no causal language model for such a config.
    """
    from transformers import AutoModelForCausalLM

    from kvpolicies.models.weights import reason

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # a config can be wrong in as many ways as a model has lines
        raise UserError(f"no causal language model for this config: {reason(error)}") from None


def predict(
    model: Any, policy: Policy | str, budget: AnyBudget, batch: int, prompt: int, new: int
) -> Memory:
    """Memory of `batch` sequences of `prompt` + `new` tokens.

    Args:
        model: a model on any device (`meta_model` makes one without storage); only shapes are read.
        budget: as `generate` takes it; `full` gets prompt + new.

    Raises:
        UserError: for a model or a budget that cannot be.
    """
    cache, dtype = _cache(model, policy, budget, prompt, new), next(model.parameters()).dtype
    try:
        cache.allocate(1, dtype, torch.device("meta"))
    except (RuntimeError, OverflowError, TypeError):  # sizes that no number of torch's holds
        raise UserError(f"a cache of {cache.slots:,} slots a KV head fits no memory") from None
    return Memory(
        batch=batch,
        weights=weight_bytes(model),
        cache=batch * cache.cache_bytes(),
        state=batch * cache.state_bytes(),
        logits=batch * _words(model) * (dtype.itemsize + 4),
    )


def _cache(
    model: Any, policy: Policy | str, budget: AnyBudget, prompt: int, new: int
) -> FixedBudgetCache:
    from kvpolicies.architecture import inspect_model
    from kvpolicies.registry import resolve

    chosen, length = resolve(policy), prompt + new
    asked, layers = asked_for(chosen, budget, length, length), inspect_model(model, chosen).evicted
    schedule = scheduled_layers(chosen, asked, prompt, new, layers)
    slots = min(length, max(one.capacity for one in each(schedule)))
    return FixedBudgetCache(
        model, chosen, [schedule], slots=slots, max_length=length, kv_dtype=asked.kv_dtype
    )


def _words(model: Any) -> int:
    return model.get_output_embeddings().weight.shape[0]


def weight_bytes(model: Any) -> int:
    """Bytes of parameters and buffers, tied ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def largest_batch(one: Memory, memory: int) -> int:
    """Rows that fit into `memory` bytes beside the weights, by arithmetic; 0 = not even one."""
    return max(0, (memory - one.weights) // one.a_row)


def largest_batch_by_allocation(
    model: Any, policy: Policy | str, budget: AnyBudget, prompt: int, new: int,
    memory: int, most: int = 4096,
) -> int:  # fmt: skip
    """Rows that fit into `memory` bytes on the model's device, by allocating them, in a bisection.

    The allocator rounds, splits and runs out where arithmetic does not: compare the two.

    Args:
        memory: bytes, the model's weights among them. most: no more rows than this are tried.
    """
    weight, weights = next(model.parameters()), weight_bytes(model)

    def fits(rows: int) -> bool:
        cache = _cache(model, policy, budget, prompt, new)
        before = _in_use(weight.device, [])
        try:
            cache.allocate(rows, weight.dtype, weight.device)
            shape = (rows, _words(model))
            logits = [torch.empty(shape, dtype=d, device=weight.device)
                      for d in (weight.dtype, torch.float32)]  # fmt: skip
        except (torch.OutOfMemoryError, UserError):
            return False
        held = [t for group in cache.groups for t in group.stored]
        held += [t for group in cache.groups for t in group.state.values()]
        return weights + _in_use(weight.device, [*held, *logits]) - before <= memory

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
        if weight.is_cuda:
            torch.cuda.empty_cache()
    return low


def _in_use(device: torch.device, tensors: list[torch.Tensor]) -> int:
    """Bytes that the device's allocator has given out; on a CPU, the tensors' storages."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum(t.untyped_storage().nbytes() for t in tensors)
