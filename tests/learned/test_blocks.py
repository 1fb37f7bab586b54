"""Scoring in blocks: the scores, and hence every eviction, of scoring token by token."""

import pytest
import torch

import kvpolicies
from kvpolicies.budget import Budget
from kvpolicies.errors import UserError
from kvpolicies.learned.scorer import Scorer
from kvpolicies.registry import resolve
from tests.learned.test_policies import draw, feed, held, layer_of, priorities
from tests.support.models import prompts, tiny
from tests.support.scorers import WINDOW

SCORERS = ["kvpop", "kvpop_pre_rope", "kvpop_at_entry", "kvpop_mlp"]


def spec(scorer: str, block: int) -> str:
    name = "kvpop_mlp" if scorer == "kvpop_mlp" else "kvpop"
    return f"{name}(scorer='random/{scorer}', block={block})"


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("block", [2, 5])
def test_every_eviction_is_that_of_single_tokens(scorer: str, block: int) -> None:
    """Rows of unequal budgets; prompts whole and in pieces; decoding, then a long piece again."""
    window = WINDOW + block - 1  # as small as may be
    budgets = [Budget(40, 2, window), Budget(47, 3, window + 2)]
    tokens = draw(2, 150)
    for pieces in ([60, *[1] * 50, 40], [1] * 150, [7] * 20 + [10]):
        layers = [layer_of(spec(scorer, m), budgets) for m in (1, block)]
        for layer in layers:
            feed(layer, tokens, pieces)
        single, blocks = layers
        assert single.eviction_times is not None and blocks.eviction_times is not None
        assert torch.equal(single.eviction_times, blocks.eviction_times)
        assert (single.eviction_times < 150).any()
        expected = priorities(blocks, tokens)
        for row in range(2):
            positions, scores = held(blocks, row)
            wanted = expected[row].gather(-1, positions)
            torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=1e-5)
        if 150 % block == 0:
            for name, tensor in single.state.items():
                torch.testing.assert_close(blocks.state[name], tensor, atol=1e-5, rtol=1e-5)


def test_the_scorer_runs_once_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row at the ends of its own blocks, whoever else is in the batch."""
    shown: list[tuple[int, int]] = []
    advance = Scorer.advance

    def watched(self, layer, seen, state):  # type: ignore[no-untyped-def]
        shown.append(tuple(seen.read.shape[::2]))  # rows, tokens
        return advance(self, layer, seen, state)

    monkeypatch.setattr(Scorer, "advance", watched)
    layer = layer_of(spec("kvpop", 4), [Budget(40, 2, 11)] * 2)
    feed(layer, draw(2, 40), [10, *[1] * 30])
    assert shown == [(2, 8)] + [(2, 4)] * 8


def test_the_same_generation() -> None:
    """Through rows that end and are replaced, each at another place of its block."""
    runs = [
        kvpolicies.generate(
            tiny(), prompts(5, 70, 17, 33), spec("kvpop", m), Budget(32, 2, 11),
            max_new_tokens=[30, 12, 40, 25], batch_size=3, eos_token_id=-1, trace=True, step=step,
        )
        for m, step in ((1, "eager"), (4, "eager"), (4, "fixed"))
    ]  # fmt: skip
    for single, *others in zip(*runs, strict=True):
        for other in others:
            assert other.tokens == single.tokens and other.max_slots == 32
            assert torch.equal(other.trace.times, single.trace.times)


def test_blocks_must_end_within_the_window() -> None:
    assert resolve(spec("kvpop", 4)).schedule(Budget(32, 2, 11), 9, 9).window == 11
    with pytest.raises(UserError, match=r"scored 11 tokens after .* window of 10 is too small"):
        resolve(spec("kvpop", 4)).schedule(Budget(32, 2, 10), 9, 9)
    with pytest.raises(UserError, match=r"scored 3 tokens after .* window of 2 is too small"):
        resolve(spec("kvpop_mlp", 4)).schedule(Budget(32, 2, 2), 9, 9)
    for wrong in ("0", "-1", "1.5", "True", "'4'"):
        with pytest.raises(UserError, match=r"block must be (at least 1|a whole number)"):
            resolve(f"kvpop_mlp(block={wrong})")
    for name in ("dms", "trimkv"):  # they would have to keep the attention's inputs for it
        with pytest.raises(UserError, match="block"):
            resolve(f"{name}(block=4)")
