"""A policy's own state charged to its budget: what it holds elsewhere, it may not keep as slots.

Under the common budget all policies hold the same slots, and their state (observation queries, a
scorer's memory, a number a slot) is reported beside it in bytes. Charged, each gives up as many
slots as its state is worth, so that all hold the same bytes (KVpop, arXiv 2607.05061, charges its
memory so: 64 of 4,096 slots).
"""

from dataclasses import replace

import torch

from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.kernels.quantise import layout, scale_bytes
from kvpolicies.policy import Geometry, Policy


def state_slots(policy: Policy, geometry: Geometry, kv_dtype: str = "auto") -> int:
    """Slots of a KV head that the policy's state is worth, rounded up.

    Args:
        geometry: of one layer and one row, with the slots that are held; the device plays no part.
        kv_dtype: what keys and values are stored in.
    """
    g = replace(geometry, rows=1, device=torch.device("meta"))
    state = sum(t.numel() * t.element_size() for t in policy.init_state(g).values())
    a_slot = sum(dtype.itemsize for dtype in policy.slot_tensors.values())
    key = g.head_dim * g.dtype.itemsize
    if kv_dtype != "auto":
        width, dtype = layout(kv_dtype, g.head_dim)
        key = width * dtype.itemsize + scale_bytes(kv_dtype)
    pair = 2 * key + torch.int32.itemsize  # key, value, position
    return -(-(state + g.heads * g.slots * a_slot) // (g.heads * pair))


def charged(policy: Policy, budget: Budget, geometry: Geometry) -> Budget:
    """The budget without the slots that the policy's state is worth.

    Sinks and window stay; the top-k pays.

    Raises:
        UserError: if nothing would be left to choose, or under a paper's own rule.
    """
    if policy.own_rule:
        raise UserError(f"policy {policy}: follows its paper's own rule, not a budget to charge")
    price = state_slots(policy, replace(geometry, slots=budget.total), budget.kv_dtype)
    if price >= budget.topk:
        raise UserError(
            f"policy {policy}: its state is worth {price} slots a head, and a budget of "
            f"{budget.total} leaves {budget.topk} beside sinks and window; nothing would remain"
        )
    return replace(budget, total=budget.total - price)
