"""The boundary loss against a loop over queries, its gradient, and the measures beside it."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

from kvpolicies.learned.boundary import (
    boundary_loss,
    recall,
    regression_loss,
    retained,
    spearman,
    static_priorities,
)
from kvpolicies.learned.targets import future_counts

SIZES: dict[str, Any] = {"sinks": 2, "window": 4, "topk": 8}
HELD = sum(SIZES.values())


def made(
    length: int = 90, packed: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """(scores, targets [2, 3, S], decay [3], documents, futures [2, S]), float64."""
    torch.manual_seed(seed)
    documents = (torch.rand(2, length) < 0.02).long().cumsum(-1) if packed else None
    scores, targets = torch.randn(2, 2, 3, length, dtype=torch.float64)
    decay = torch.rand(3, dtype=torch.float64) * 0.1
    return scores, targets, decay, documents, future_counts(targets[:, 0], 4, documents)


def looped(
    scores: Tensor, targets: Tensor, decay: Tensor, documents: Tensor | None, futures: Tensor,
    min_future: int, tau: float, margin: bool,
) -> tuple[float, float, int]:  # fmt: skip
    """(loss, accuracy, pairs), pair by pair."""
    boundary = retained(static_priorities(targets, decay, documents), **SIZES, documents=documents)[
        0
    ]
    losses, rights, pairs = [], [], 0
    for h in range(scores.shape[1]):
        found: dict[bool, list[tuple[float, float, bool]]] = {True: [], False: []}
        for b, q in torch.cartesian_prod(*map(torch.arange, (2, scores.shape[-1]))).tolist():
            old, new = int(boundary[b, h, q]), q - SIZES["window"]
            if old < 0 or min(futures[b, old], futures[b, new]) < min_future:
                continue
            age = float(decay[h]) * (new - old)
            better = float(targets[b, h, new] - targets[b, h, old]) + age
            ahead = scores[b, h, new] - scores[b, h, old] + age
            y = 1 if better > 0 else -1
            one = float(torch.nn.functional.softplus(-y * ahead / tau))
            found[y > 0].append((one, abs(better) if margin else 1.0, bool((ahead > 0) == (y > 0))))
        pairs += sum(map(len, found.values()))
        for its in filter(None, found.values()):
            losses.append(sum(x * w for x, w, _ in its) / sum(w for _, w, _ in its))
            rights.append(sum(right for _, _, right in its) / len(its))
    return sum(losses) / len(losses), sum(rights) / len(rights), pairs


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("min_future", [1, 20])
def test_equal_to_a_loop(packed: bool, min_future: int, margin: bool) -> None:
    scores, targets, decay, documents, futures = made(packed=packed, seed=min_future)
    arguments = (scores, targets, decay, documents, futures)
    expected = looped(*arguments, min_future, 0.7, margin)
    got = boundary_loss(
        scores, targets, decay, **SIZES, futures=futures, min_future=min_future, tau=0.7,
        documents=documents, margin=margin,
    )  # fmt: skip
    assert expected[2] > 20
    assert (got.loss.item(), got.accuracy.item()) == pytest.approx(expected[:2])
    assert int(got.pairs) == expected[2]


def test_gradient_is_right() -> None:
    scores, targets, decay, _, futures = made(40)

    def loss(scores: Tensor, decay: Tensor) -> Tensor:
        # The teacher's decay changes too, but its choices change in steps only.
        return boundary_loss(scores, targets, decay, **SIZES, futures=futures, min_future=5).loss

    arguments = (scores.requires_grad_(), decay.requires_grad_())
    assert torch.autograd.gradcheck(loss, arguments)


def test_gradient_pushes_the_right_way() -> None:
    """The loss falls to the teacher's order, whatever the scores began with."""
    scores, targets, _, _, futures = made(120)
    scores.requires_grad_()
    optimizer = torch.optim.Adam([scores], lr=0.1)
    ask: dict[str, Any] = SIZES | {"futures": futures, "min_future": 8, "tau": 0.2}
    begin = boundary_loss(scores, targets, None, **ask)
    slope = torch.autograd.grad(begin.loss, scores)[0]
    boundary = retained(targets, **SIZES)[0]
    for b, h, q in (boundary >= 0).nonzero().tolist():
        new = q - SIZES["window"]
        above = targets[b, h, new] > targets[b, h, boundary[b, h, q]]
        if futures[b, new] >= 8 and not (boundary[b, h] == new).any():  # it is in no other pair
            assert (slope[b, h, new] < 0) == above
    for _ in range(150):
        optimizer.zero_grad()
        boundary_loss(scores, targets, None, **ask).loss.backward()
        optimizer.step()
    end = boundary_loss(scores, targets, None, **ask)
    assert abs(begin.accuracy.item() - 0.5) < 0.2 and end.accuracy.item() > 0.98
    assert end.loss < 0.1 * begin.loss
    before, after = (recall(x, targets, **SIZES, min_future=8) for x in (made(120)[0], scores))
    assert (after > before + 0.3).all()


def test_the_teacher_itself_is_right_everywhere() -> None:
    _, targets, decay, documents, futures = made(packed=True)
    ask: dict[str, Any] = SIZES | {"documents": documents, "min_future": 5}
    assert boundary_loss(targets, targets, decay, **ask, futures=futures).accuracy == 1
    teacher = static_priorities(targets, decay, documents)
    for at in ("every", "ends"):
        assert recall(teacher, teacher, **ask, at=at).tolist() == [1, 1, 1]
    correlation = spearman(targets, targets, futures, documents, 5)
    torch.testing.assert_close(correlation, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("length", [1, HELD - 1, HELD])
def test_a_sequence_within_the_budget_has_no_pairs(length: int) -> None:
    scores, targets, decay, documents, futures = made(length)
    got = boundary_loss(
        scores.requires_grad_(), targets, decay.requires_grad_(), **SIZES, futures=futures,
        min_future=1, documents=documents,
    )  # fmt: skip
    assert int(got.pairs) == 0 and got.loss == 0 and got.accuracy.isnan()
    got.loss.backward()
    assert scores.grad is not None and decay.grad is not None
    assert not scores.grad.any() and not decay.grad.any()
    assert recall(scores, targets, **SIZES).isnan().all()


def test_the_first_pair_comes_with_the_first_token_too_many() -> None:
    scores, targets, decay, _, futures = made(HELD + 1)
    got = boundary_loss(scores, targets, decay, **SIZES, futures=futures, min_future=1)
    assert int(got.pairs) == 2 * 3


def test_what_the_last_targets_are_makes_no_difference() -> None:
    """Tokens with a short future are in no pair, and no boundary of a pair depends on them."""
    scores, targets, decay, documents, futures = made(packed=True)
    ask: dict[str, Any] = SIZES | {"futures": futures, "min_future": 10, "documents": documents}
    other = targets.where((futures >= 10)[:, None], 1e3 * torch.randn_like(targets))
    unscored = scores.where((futures >= 10)[:, None], float("nan")).requires_grad_()
    first = boundary_loss(scores, targets, decay, **ask)
    second = boundary_loss(unscored, other, decay, **ask)
    assert first == second
    assert torch.autograd.grad(second.loss, unscored)[0].isfinite().all()


@pytest.mark.parametrize("at", ["every", "ends"])
@pytest.mark.parametrize("packed", [False, True])
def test_recall_equals_sets_compared(packed: bool, at: str) -> None:
    scores, targets, decay, documents, _ = made(packed=packed, seed=3)
    teacher = static_priorities(targets, decay, documents)
    ask: dict[str, Any] = SIZES | {"documents": documents}
    both = [retained(x, **ask)[1] for x in (scores, teacher)]
    numbers = torch.zeros(2, 90).long() if documents is None else documents
    for h in range(3):
        shares, ends = [], {}
        for b, q in torch.cartesian_prod(torch.arange(2), torch.arange(90)).tolist():
            its = numbers[b] == numbers[b, q]
            first, last = int(its.nonzero()[0]), int(its.nonzero()[-1])
            entered = range(first + SIZES["sinks"], q - SIZES["window"] + 1)
            if len(entered) > SIZES["topk"] and last - q + 1 >= 7:
                a, c = ({t for t in entered if e[b, h, t] > q} for e in both)
                assert len(a) == len(c) == SIZES["topk"]
                shares.append(len(a & c) / len(c))
                ends[b, first] = shares[-1]
        shares = list(ends.values()) if at == "ends" else shares
        got = recall(scores, teacher, **ask, min_future=7, at=at)[h]
        assert got.item() == pytest.approx(sum(shares) / len(shares))


def test_chance_recalls_what_chance_must() -> None:
    torch.manual_seed(0)
    scores, targets = torch.randn(2, 8, 4, 300)
    got = recall(scores, targets, 2, 4, 30, min_future=1, at="ends").mean().item()
    eligible = 300 - 1 - 4 - 2
    assert got == pytest.approx(30 / eligible, abs=0.03)


def test_regression_is_the_mean_squared_error() -> None:
    scores, targets, _, _, futures = made(90)
    there = (futures >= 20)[:, None].expand_as(scores)
    expected = (scores - targets)[there].square().mean()
    torch.testing.assert_close(regression_loss(scores, targets, futures, 20), expected)
    nobody = regression_loss(scores.requires_grad_(), targets, futures, 1000)
    nobody.backward()
    assert nobody == 0 and scores.grad is not None and not scores.grad.any()


def test_spearman_is_scipys() -> None:
    scores, targets, _, documents, futures = made(packed=True, seed=2)
    scores = scores.round()  # ties
    assert documents is not None
    got = spearman(scores, targets, futures, documents, 10)
    for h in range(3):
        total, tokens = 0.0, 0
        for b, start in [(row, d) for row in range(2) for d in documents[row].unique()]:
            its = (documents[b] == start) & (futures[b] >= 10)
            if (n := int(its.sum())) > 1:
                rho: Any = scipy.stats.spearmanr(scores[b, h, its], targets[b, h, its])[0]
                total += n * rho
                tokens += n
        assert got[h].item() == pytest.approx(total / tokens)
    assert not spearman(torch.ones_like(scores), targets, futures, documents, 10).any()
    assert spearman(scores, targets, futures, documents, 1000).isnan().all()


def test_refusals_take_one_line() -> None:
    scores, targets, decay, _, futures = made(30)
    ask: dict[str, Any] = SIZES | {"futures": futures}
    with pytest.raises(ValueError, match="tau must be > 0, got 0"):
        boundary_loss(scores, targets, decay, **ask, tau=0)
    with pytest.raises(ValueError, match="min_future must be at least 1, got 0"):
        boundary_loss(scores, targets, decay, **ask, min_future=0)
    with pytest.raises(ValueError, match="'every' or 'ends', got 'end'"):
        recall(scores, targets, **SIZES, at="end")
    with pytest.raises(ValueError, match="not a number"):
        boundary_loss(scores, targets * float("nan"), decay, **ask)
