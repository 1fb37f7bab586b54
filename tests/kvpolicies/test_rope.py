"""Rotation there and back, scaled and partial."""

import pytest
import torch

from kvpolicies.architecture import find_ropes
from kvpolicies.rope import Rope
from tests.support.models import tiny


def rope(rotated: int, scale: float) -> Rope:
    def cos_sin(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[..., None] / 1e4 ** (torch.arange(rotated // 2) * 2 / rotated)
        return scale * torch.cat([angle] * 2, -1).cos(), scale * torch.cat([angle] * 2, -1).sin()

    made = Rope(cos_sin)
    made.prepare(2000, torch.device("cpu"))
    return made


@pytest.mark.parametrize("rotated", [8, 16, 32])
@pytest.mark.parametrize("scale", [1.0, 1.27])
def test_unrotate_undoes_rotate(rotated: int, scale: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 5, 32, generator=g)
    positions = torch.randint(0, 2000, (2, 5), generator=g)
    r = rope(rotated, scale)
    assert (r.unrotate(r.rotate(x, positions), positions) - x).abs().max() < 1e-5
    by_head = positions[:, None, None].expand(2, 3, 4, 5)
    assert torch.equal(r.rotate(x, by_head), r.rotate(x, positions))
    assert torch.equal(r.rotate(x, positions)[..., rotated:], x[..., rotated:])


def test_logits_depend_on_distance_only() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 32, generator=g)
    r = rope(32, 1.0)

    def logit(at: int, to: int) -> float:
        rotated = r.rotate(q, torch.tensor([[at]])), r.rotate(k, torch.tensor([[to]]))
        return (rotated[0] * rotated[1]).sum().item()

    assert logit(900, 880) == pytest.approx(logit(30, 10), abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_is_the_models_own_rotation(family: str) -> None:
    """Queries before RoPE come back to 1e-5 from the model's own rotated ones."""
    import importlib

    model = tiny(family)
    module = importlib.import_module(type(model).__module__)
    (r, *_) = find_ropes(model)
    r.prepare(500, torch.device("cpu"))
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 7, 16, generator=g)
    positions = torch.randint(0, 500, (1, 7), generator=g)
    cos, sin = model.model.rotary_emb(q, positions)
    theirs = module.apply_rotary_pos_emb(q, q, cos, sin)[0]
    assert (r.rotate(q, positions) - theirs).abs().max() < 1e-5
    assert (r.unrotate(theirs, positions) - q).abs().max() < 1e-5


def test_no_position_embedding_is_the_identity() -> None:
    x = torch.randn(1, 1, 2, 8)
    assert torch.equal(Rope(None).rotate(x, torch.tensor([[3, 4]])), x)


@pytest.mark.parametrize(("rotated", "scale"), [(32, 1.0), (32, 1.27), (8, 1.1)])
def test_rotate_over_is_the_mean_of_rotations(rotated: int, scale: float) -> None:
    g = torch.Generator().manual_seed(0)
    x, r = torch.randn(2, 3, 4, 32, generator=g), rope(rotated, scale)
    positions, offsets = torch.tensor([5, 900]), (2, 3, 5, 513)
    each = [r.rotate(x[:, :, :, None], positions[:, None] + far)[:, :, :, 0] for far in offsets]
    mean = torch.stack(each).mean(dim=0)
    assert (r.rotate_over(x, positions, offsets) - mean).abs().max() < 2e-4
    before, after = r.sizes(x), r.sizes(r.rotate(x[:, :, :, None], positions[:, None])[:, :, :, 0])
    assert (after - before * r.scales(x)).abs().max() < 1e-5
    assert before.shape[-1] == 32 - rotated // 2
    none = Rope(None)
    assert torch.equal(none.rotate_over(x, positions, offsets), x)
    assert torch.equal(none.sizes(x), x.abs())
