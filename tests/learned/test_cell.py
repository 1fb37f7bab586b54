"""The mLSTM cell: xlstm's chunkwise and step forms against the recurrence, by hand in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicies.learned.nets import ScorerInput, State
from kvpolicies.learned.scorer import CHUNK, CHUNKS, CellInput, Scorer, cell
from tests.support.scorers import random_scorer, small


def by_hand(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, resets: set[int]) -> Tensor:
    """C <- f C + i k v^T, n <- f n + i k, h = C^T q / max(|n q|, 1), with no stabiliser."""
    q, k, v, i, f = (x.double() for x in (q, k, v, i, f))
    b, h, s, m = q.shape
    out = torch.zeros(b, h, s, m, dtype=torch.float64)
    for row in range(b):
        for head in range(h):
            memory, normaliser = torch.zeros(m, m).double(), torch.zeros(m).double()
            for t in range(s):
                keep = 0.0 if t in resets else 1 / (1 + math.exp(-f[row, head, t]))
                new = math.exp(i[row, head, t])
                key, value = k[row, head, t], v[row, head, t]
                memory = keep * memory + new * torch.outer(key, value)
                normaliser = keep * normaliser + new * key
                query = q[row, head, t] / math.sqrt(m)
                out[row, head, t] = memory.T @ query / max(abs(float(normaliser @ query)), 1.0)
    return out


def draw(s: int, m: int = 6, rows: int = 2, seed: int = 0) -> CellInput:
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, rows, 3, s, m, generator=g)
    i, f = torch.randn(2, rows, 3, s, generator=g) * 2
    return CellInput(q, k, v, i, f + 3)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal to 1e-5 after the norm, which all read-outs go through.

    Before it they are as good as their divisor, a sum that at times all but cancels.
    """
    normed = [F.rms_norm(x.double(), x.shape[-1:], eps=1e-6) for x in (ours, theirs)]
    assert (normed[0] - normed[1]).abs().max() <= 1e-5


def zeros(rows: int, heads: int, m: int) -> State:
    return {
        "memory": torch.zeros(rows, heads, m, m),
        "normaliser": torch.zeros(rows, heads, m),
        "scale": torch.zeros(rows, heads),
    }


@pytest.mark.parametrize("s", [1, 7, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_chunks_steps_and_the_recurrence_agree(s: int) -> None:
    drawn = draw(s)
    expected = by_hand(*drawn, set())
    whole, last = cell(drawn, zeros(2, 3, 6))
    close(whole, expected)
    state, outs = zeros(2, 3, 6), []
    for t in range(s):
        out, state = cell(drawn.part(slice(t, t + 1)), state)
        outs.append(out)
    close(torch.cat(outs, 2), expected)
    for name in state:
        torch.testing.assert_close(state[name], last[name], rtol=1e-5, atol=1e-5)


def test_pieces_of_any_size_carry_the_state_on() -> None:
    drawn = draw(200)
    whole, last = cell(drawn, None)
    state, outs, first = zeros(2, 3, 6), [], 0
    for n in (1, 70, 1, 1, 64, 3, 60):
        out, state = cell(drawn.part(slice(first, first + n)), state)
        outs.append(out)
        first += n
    assert first == 200
    close(torch.cat(outs, 2), whole)
    torch.testing.assert_close(state["memory"], last["memory"], rtol=1e-5, atol=1e-5)


def test_more_chunks_than_a_call_takes_are_one_sequence() -> None:
    """The cell's backward grows with the square of the chunks, so a long row takes many calls."""
    s = CHUNK * CHUNKS + 100
    drawn = draw(s, rows=1)
    whole, _ = cell(drawn, None)
    state, outs = None, []
    for first in range(0, s, 333):
        out, state = cell(drawn.part(slice(first, first + 333)), state)
        outs.append(out)
    close(torch.cat(outs, 2), whole)


def test_extreme_gates_stay_finite() -> None:
    """The cap lets gates run to 15 either way; the divisor needs no epsilon."""
    q, k, v, i, f = draw(300)
    for input_gate in (-15.0, 15.0):
        for forget_gate in (-15.0, 15.0):
            gates = torch.full_like(i, input_gate), torch.full_like(f, forget_gate)
            out, _ = cell(CellInput(q, k, v, *gates), None)
            assert out.isfinite().all()


def test_gradients_through_cell_and_norm() -> None:
    """In float64, by finite differences: two chunks of the chunkwise form, read, norm and head."""
    config = small("kvpop", layers=(0,), heads=2, head_dim=2, memory=2)
    scorer = random_scorer(config).double()
    net = scorer.nets["0"]
    names = [name for name, _ in net.named_parameters()]
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1, 2, 9, 4, generator=g, dtype=torch.float64)
    starts = torch.tensor([[False] * 5 + [True] + [False] * 3])

    def run(*weights: Tensor) -> Tensor:
        seen = ScorerInput(x, x.flip(2), starts=starts)
        named = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(net, named, (seen, None))[0]

    weights = [p.detach().clone().requires_grad_() for p in net.parameters()]
    assert torch.autograd.gradcheck(run, weights, atol=1e-6)


def test_a_long_rows_gradient_is_that_of_its_pieces() -> None:
    """Over the seam between two calls of the cell."""
    wide = draw(CHUNK * CHUNKS + 5, m=2, rows=1)
    drawn = CellInput(*(x.double().requires_grad_() for x in wide))
    out, _ = cell(drawn, None)
    out[:, :, -1].sum().backward()
    gate = drawn.i.grad
    assert gate is not None and gate[:, :, CHUNK * CHUNKS - 3].abs().min() > 0


def test_a_scorer_starts_as_described() -> None:
    net = Scorer(small("kvpop", heads=3, head_dim=64)).nets["0"]
    parameters = dict(net.named_parameters())
    assert parameters["gate_bias"][:, 1].tolist() == [3.0, 4.5, 6.0]
    assert not parameters["gate_bias"][:, 0].any() and not parameters["write"][..., -2:].any()
    assert abs(float(parameters["head"].detach().std()) - 0.02) < 0.005
