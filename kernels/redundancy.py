"""R-KV's redundancy of cached keys, without an L x L matrix (arXiv 2505.24133, Section 3)."""

import torch
from torch import Tensor

BLOCK = 128


def key_redundancy(
    keys: Tensor, positions: Tensor, beta: int = 1, threshold: float = 0.5
) -> Tensor:
    """How much each key repeats the others of its head.

    The cosine of all pairs of keys, diagonal zero; in each row the entries of its `beta` most
    recent neighbours with a cosine above `threshold` are zeroed (so that of many copies the newest
    counts as new); mean over rows; softmax over tokens.

    Args:
        keys: [B, H, L, D].
        positions: [B, H, L] integer, distinct within a head; "recent" is by position, not slot.

    Returns:
        [B, H, L] float32, sums to one over L. Memory O(BLOCK * L) a head.
    """
    unit = torch.nn.functional.normalize(keys.float(), dim=-1, eps=1e-8)
    length = unit.shape[-2]
    total = torch.zeros(unit.shape[:-1], device=unit.device)
    for start in range(0, length, BLOCK):
        cosine = unit[..., start : start + BLOCK, :] @ unit.transpose(-1, -2)  # [B, H, block, L]
        rows = cosine.shape[-2]
        cosine.diagonal(offset=start, dim1=-2, dim2=-1)[..., :rows].zero_()
        similar = torch.where(cosine > threshold, positions[..., None, :].long() + 1, 0)
        for _ in range(min(beta, length)):
            newest, where = similar.max(dim=-1, keepdim=True)
            kept = cosine.gather(-1, where).masked_fill(newest > 0, 0.0)
            cosine.scatter_(-1, where, kept)
            similar.scatter_(-1, where, 0)
        total += cosine.sum(dim=-2)
    return (total / length).softmax(dim=-1)
