"""Scores of the training form: what each is, documents, delay, age, and the step form."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.learned.nets import ScorerInput
from kvpolicies.learned.scorer import Scorer
from tests.learned.test_cell import by_hand
from tests.support.scorers import WINDOW, random_scorer, small

CONFIGS = [
    small("kvpop"),
    small("kvpop", memory=12),
    small("kvpop", delay=False),
    small("kvpop_mlp"),
    small("dms"),
    small("trimkv", hidden=32),
]


def named(config: Any) -> str:
    return f"{config.kind}-{config.memory}-{config.delay}"


def draw(s: int, rows: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, 2, s, 8, generator=g)
    return keys, values, torch.randn(rows, s, 16, generator=g)


def test_kvpops_scores_by_hand() -> None:
    """Projections, gates, memory, read by the token that leaves, norm, head: all in float64."""
    scorer = random_scorer(small("kvpop", memory=5))
    p = {name: w.detach().double() for name, w in scorer.nets["1"].named_parameters()}
    keys, values, _ = draw(90)
    x = torch.cat([keys, values], -1).double()
    written = torch.einsum("bhsx,hxo->bhso", x, p["write"])
    gates = 15 * torch.tanh((written[..., 10:] + p["gate_bias"][:, None]) / 15)
    read = torch.einsum("bhsx,hxo->bhso", x, p["read"])
    delayed = torch.zeros_like(read)
    delayed[:, :, WINDOW:] = read[:, :, :-WINDOW]
    parts = (delayed, written[..., :5], written[..., 5:10], gates[..., 0], gates[..., 1])
    h = by_hand(*parts, set())
    normed = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = torch.einsum("bhsm,hm->bhs", normed, p["head"]) + p["head_bias"][:, None]
    r = scorer.scores(1, keys, values)
    assert r.dtype == torch.float32 and r.shape == (2, 2, 90)
    assert (r[:, :, :-WINDOW] - expected[:, :, WINDOW:]).abs().max() <= 1e-5
    assert not r[:, :, -WINDOW:].any()
    assert r[:, :, :-WINDOW].std() > 0.3


def test_the_delayed_read_is_a_shift_of_the_query() -> None:
    """What came since is what the memory knows more: nothing else changes."""
    scorer = random_scorer(small("kvpop"))
    at_entry = Scorer(small("kvpop", delay=False))
    at_entry.load_state_dict(scorer.state_dict())
    keys, values, _ = draw(40)
    repeated = [x[:, :, :1].expand(x.shape) for x in (keys, values)]  # shifting changes nothing
    late, early = scorer.scores(0, *repeated), at_entry.scores(0, *repeated)
    torch.testing.assert_close(late[:, :, :-WINDOW], early[:, :, WINDOW:])
    late, early = scorer.scores(0, keys, values), at_entry.scores(0, keys, values)
    assert (late - early)[:, :, :-WINDOW].abs().max() > 0.1


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_packed_documents_are_separate_documents(config: Any) -> None:
    scorer = random_scorer(config)
    lengths = [70, 5, 30, 1, 90]  # two are shorter than the window: without scores
    documents = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]] * 2)
    keys, values, inputs = draw(sum(lengths))
    packed = scorer.scores(0, keys, values, inputs, documents)
    first = 0
    for n in lengths:
        part = slice(first, first + n)
        alone = scorer.scores(0, keys[:, :, part], values[:, :, part], inputs[:, part])
        assert (packed[:, :, part] - alone).abs().max() <= 1e-5 * max(1, alone.abs().max())
        assert not alone[:, :, max(0, n - config.lag) :].any() or config.lag == 0
        first += n


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_step_by_step_gives_the_same_scores(config: Any) -> None:
    scorer = random_scorer(config)
    keys, values, inputs = draw(120)
    expected = scorer.scores(0, keys, values, inputs)
    x = scorer.features(keys, values)
    for sizes in ([1] * 120, [50, 1, 1, 20, 48], [120]):
        state = {n: torch.zeros(2, *shape) for n, shape in config.state_shapes.items()}
        outs, first = [], 0
        for n in sizes:
            new = torch.arange(first, first + n)
            old = (new - config.lag).clamp_min(0)
            seen = ScorerInput(x[:, :, new], x[:, :, old], inputs[:, new])
            outs.append(scorer.advance(0, seen, state).detach())
            first += n
        got = torch.cat(outs, 2)[:, :, config.lag :]
        assert (got - expected[:, :, : 120 - config.lag]).abs().max() <= 1e-5 * expected.abs().max()


def test_scores_need_no_gradient_of_their_inputs_and_any_dtype_will_do() -> None:
    scorer = random_scorer(small("kvpop"))
    keys, values, _ = draw(30)
    r = scorer.scores(0, keys.bfloat16().requires_grad_(), values.bfloat16())
    assert r.dtype == torch.float32
    r.sum().backward()
    assert all(p.grad is not None for p in scorer.nets["0"].parameters())
    assert scorer.scores(0, keys[:, :, :3], values[:, :, :3]).shape == (2, 2, 3)


def test_dms_is_minus_the_logit_read_one_token_later() -> None:
    scorer = random_scorer(small("dms"))
    keys, values, inputs = draw(9)
    proj = dict(scorer.nets["0"].named_parameters())["proj.weight"].detach()
    logits = 100 * torch.einsum("bse,he->bhs", inputs, proj) - 5
    r = scorer.scores(0, keys, values, inputs)
    torch.testing.assert_close(r[:, :, :-1], -logits[:, :, 1:], rtol=1e-5, atol=1e-4)
    assert not r[:, :, -1].any()
    assert (Scorer(small("dms")).scores(0, keys, values, inputs)[:, :, :-1] == 5).all()


def test_trimkv_starts_with_gates_that_keep() -> None:
    keys, values, inputs = draw(9)
    r = Scorer(small("trimkv")).scores(0, keys, values, inputs)
    assert (r.exp() > 0.999).all() and (r.exp() < 1).all()


def test_age_decay() -> None:
    scorer = Scorer(small("kvpop"))
    age = scorer.age(1)
    assert age.shape == (2,) and (age > 0).all() and (age < 1e-3).all() and age.requires_grad
    for config in (small("kvpop", decay=False), small("dms"), small("trimkv")):
        assert not Scorer(config).age(0).any()


def test_configs_that_cannot_be_are_refused() -> None:
    good = small("kvpop")
    assert (good.memory, small("kvpop_mlp").hidden, small("trimkv").hidden) == (8, 16, 512)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"kind": "kvpoop"}, "did you mean 'kvpop'"),
        ({"features": "rope"}, "post_rope or pre_rope"),
        ({"layers": ()}, "at least one"),
        ({"layers": (1, 1)}, "distinct"),
        ({"heads": 0}, "heads"),
        ({"window": -1}, "window"),
        ({"kind": "dms", "input_size": 0}, "input_size"),
        ({"base": {"architecture": "x"}}, "config_hash"),
    ]
    for change, says in changes:
        with pytest.raises(UserError, match=says):
            replace(good, **change)
