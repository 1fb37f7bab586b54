"""Boundaries and eviction times against brute force, and what they say of static priorities."""

from __future__ import annotations

import pytest
import torch

from kvpolicies.kernels.retention import NEVER, document_bounds, retain
from tests.support.retention import Case, brute_force, eligible, random_case, spans


@pytest.mark.parametrize("block", range(5))
def test_equal_to_brute_force(block: int) -> None:
    """500 rows, some of several documents, many ties; and the Fenwick tree's plain form."""
    for seed in range(100 * block, 100 * block + 100):
        case = random_case(seed)
        boundary, expires = retain(*case)
        expected = brute_force(case)
        assert torch.equal(boundary, expected[0]) and torch.equal(expires, expected[1])
        assert boundary.dtype == expires.dtype == torch.int32
        assert torch.equal(boundary, fenwick(case)), seed


def fenwick(case: Case) -> torch.Tensor:
    """Boundaries as the GPU's program finds them, in plain Python."""
    out = torch.full(case.priorities.shape, -1, dtype=torch.int32)
    for row, values in enumerate(case.priorities.tolist()):
        documents = None if case.documents is None else case.documents[row]
        for first, last in spans(documents, len(values)):
            size = last - first
            order = eligible(first, last - 1, values)[::-1]
            rank = {t: i for i, t in enumerate(order)}
            tree = [0] * (size + 1)
            for t in range(first + case.sinks, last - case.window):
                wanted = t - first - case.sinks - case.topk + 1
                if wanted > 0:
                    below, step = 0, 1 << size.bit_length() - 1
                    while step:
                        node = below + step
                        if node <= size and tree[node] < wanted:
                            below, wanted = node, wanted - tree[node]
                        step //= 2
                    out[row, t + case.window] = order[below]
                node = rank[t] + 1
                while node <= size:
                    tree[node] += 1
                    node += node & -node
    return out


def test_many_rows_are_rows_alone() -> None:
    case = random_case(8, rows=7)
    assert case.documents is not None
    boundary, expires = retain(*case)
    for i in range(7):
        alone = (case.priorities[i : i + 1], case.sinks, case.window, case.topk)
        one = retain(*alone, case.documents[i : i + 1])
        assert torch.equal(boundary[i], one[0][0]) and torch.equal(expires[i], one[1][0])


@pytest.mark.parametrize("length", [1, 7, 11, 12, 13])
def test_nothing_leaves_before_the_budget_is_full(length: int) -> None:
    """sinks 3 + window 4 + topk 5 = 12 tokens fit."""
    boundary, expires = retain(torch.randn(2, length), 3, 4, 5)
    assert int((expires != NEVER).sum()) == 2 * max(0, length - 12)
    assert int((boundary != -1).sum()) == 2 * max(0, length - 12)


def test_documents_are_sequences_alone() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(1, n) for n in (1, 33, 20, 57)]
    documents = torch.cat([torch.full((1, p.shape[1]), 2 * i) for i, p in enumerate(parts)], 1)
    boundary, expires = retain(torch.cat(parts, 1), 2, 5, 6, documents)
    start = 0
    for part in parts:
        here = slice(start, start + part.shape[1])
        alone = retain(part, 2, 5, 6)
        its = [x[:, here].long() for x in (boundary, expires)]
        its = [x.where((x < 0) | (x == NEVER), x - start).int() for x in its]
        assert torch.equal(its[0], alone[0]) and torch.equal(its[1], alone[1])
        start = here.stop


def test_zeros_of_both_signs_tie() -> None:
    _, expires = retain(torch.tensor([[0.0, -0.0, 0.0, -0.0]]), 0, 0, 1)
    assert expires.tolist() == [[1, 2, 3, NEVER]]


def test_infinite_priorities_rank() -> None:
    inf = float("inf")
    _, expires = retain(torch.tensor([[inf, -inf, 0.0, 1.0]]), 0, 0, 2)
    assert expires.tolist() == [[NEVER, 2, 3, NEVER]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    case = random_case(3)
    other = retain(case.priorities.to(dtype).requires_grad_(), *list(case)[1:])
    assert all(torch.equal(a, b) for a, b in zip(other, retain(*case), strict=True))


def test_no_token_and_no_row() -> None:
    for shape in ((0, 5), (3, 0)):
        boundary, expires = retain(torch.zeros(shape), 0, 1, 2)
        assert boundary.shape == expires.shape == shape


def test_bounds_of_documents() -> None:
    documents = torch.tensor([[0, 0, 0, 4, 4, 9], [1, 2, 2, 2, 2, 2]])
    first, last = document_bounds(torch.zeros(2, 6), documents)
    assert first.tolist() == [[0, 0, 0, 3, 3, 5], [0, 1, 1, 1, 1, 1]]
    assert last.tolist() == [[3, 3, 3, 5, 5, 6], [1, 6, 6, 6, 6, 6]]
    wide, _ = document_bounds(torch.zeros(2, 3, 6), documents[:, None])
    assert torch.equal(wide[:, 2], first)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.tensor([[0.0, float("nan")]]), 0, 1, 1), "token 1 in row 0 is not a number"),
        ((torch.zeros(2, 3), 0, 1, 0), "topk >= 1, got 0, 1, 0"),
        ((torch.zeros(2, 3), -1, 1, 1), "must be >= 0"),
        ((torch.zeros(3), 0, 1, 1), r"\[rows, tokens\]"),
        ((torch.zeros(2, 3).long(), 0, 1, 1), "float"),
        ((torch.zeros(2, 3), 0, 1, 1, torch.tensor([[0, 1, 0]])), "must not decrease"),
        ((torch.zeros(2, 3), 0, 1, 1, torch.zeros(2, 4).long()), "do not fit"),
    ],
)
def test_refusals_take_one_line(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        retain(*arguments)
    assert "\n" not in str(error.value)
