"""Every figure of a revisit analysis against a brute force over whole S x S attention matrices.

The reference takes transformers' own eager attention weights and the model's own query projections:
it shares neither hooks, blocks nor RoPE with what it checks.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpolicies.architecture import find_ropes
from kvpolicies.eval.revisit import attention
from kvpolicies.eval.revisit.attention import BINS, BLOCK, LOSSES, NEEDED, bounds, largest, look
from kvpolicies.eval.revisit.config import Revisit, Rule
from kvpolicies.eval.revisit.evictions import decode
from kvpolicies.eval.revisit.rows import analyse
from kvpolicies.eval.revisit.setting import Setting
from kvpolicies.eval.revisit.space import Sample, mean_cosines, principal
from kvpolicies.eval.revisit.traces import Trace
from kvpolicies.kernels.logit_transform import LogitTransform
from tests.support.models import prompts, tiny


class Words:
    """A tokenizer that writes numbers."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def brute(weights: np.ndarray, first: int, rule: Rule, times: np.ndarray) -> dict:
    """All figures of one query head from its weights [S, S], one pair at a time.

    times: [cells, S].
    """
    size = len(weights)
    out = {
        "top-k": [], "weighted": [], "histogram": np.zeros((2, BINS)),
        "received": np.zeros(size), "revisits": np.zeros(size),
        "totals": np.zeros(4), "lost": np.zeros((len(times), 4)),
    }  # fmt: skip
    for q in range(first, size):
        keys = range(rule.sinks, q + 1)
        top = set(sorted(keys, key=lambda t: (-weights[q, t], -t))[: rule.k])
        mass = sum(weights[q, t] for t in keys)
        plain = sum(q - t for t in top) / max(1, len(top))
        by_mass = sum(weights[q, t] * (q - t) for t in keys) / mass if mass else 0.0
        out["top-k"].append(plain > rule.distance)
        out["weighted"].append(by_mass > rule.distance)
        is_global = out[rule.definition][-1]
        for t in range(q + 1):
            w, d = weights[q, t], q - t
            sink = t < rule.sinks
            place = BINS - 1 if sink else next(i for i in range(BINS) if d <= bounds(i)[1])
            out["histogram"][int(is_global), place] += w
            far = not sink and d > rule.distance
            revisit = far and is_global and t in top
            counts = np.array([revisit, w * revisit, w * far, w])
            out["received"][t] += w * far
            out["revisits"][t] += revisit
            out["totals"] += counts
            out["lost"] += (times[:, t] <= q)[:, None] * counts
    return out


def eager(model, tokens: list[int]) -> list[np.ndarray]:
    """Each layer's weights [query heads, S, S] by transformers' own eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return [a[0].double().numpy() for a in found.attentions]


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "prompt", "new", "options"),
    [
        ("llama", 4, 2, 11, 30, {}),
        ("llama", 4, 2, 3, 41, {"definition": "weighted"}),
        ("qwen3", 3, 1, 15, 24, {"sinks": 0, "k": 7}),
        ("qwen2", 2, 2, 33, 5, {"k": 1000}),
    ],
)
def test_a_row_equals_a_brute_force(family, heads, kv_heads, prompt, new, options, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)  # several blocks, the last one odd
    model = tiny(family, heads, kv_heads, layers=2)
    config = Revisit(
        policies=("streaming", "h2o"),
        budgets=("16", "75%"),
        profile="shares.yaml",
        k=options.get("k", 12),
        distance=9.0,
        scale_below=0,
        **{name: value for name, value in options.items() if name != "k"},
    )
    tokens = prompts(prompt + new)[0]
    trace = Trace("a", tokens[:prompt], tokens[prompt:])
    analysis = Setting(config, model, Words(), find_ropes(model))
    evictions = decode(analysis, [trace], 0, lambda n: None)["a"]
    row = analyse(analysis, trace, evictions, pictured=True)
    rule = Rule.of(config, len(trace.tokens))
    sums: dict[str, np.ndarray] = {}
    for layer, weights in enumerate(eager(model, trace.tokens)):
        late = np.sort(weights[:, prompt:], axis=-1)[..., ::-1].cumsum(-1)
        needed = 1 + (late < NEEDED).sum(-1)
        np.testing.assert_allclose(row["needs"][layer], needed.mean(), rtol=1e-6)
    for layer, weights in enumerate(eager(model, trace.tokens)):
        for head, own in enumerate(weights):
            times = np.stack([e.times[layer, head // (heads // kv_heads)] for e in evictions])
            expected = brute(own, prompt, rule, times)
            for name in ("top-k", "weighted"):
                assert row["global"][name][layer][head] == sum(expected[name])
            for name in ("histogram", "received", "revisits", "totals", "lost"):
                sums[name] = sums.get(name, 0) + expected[name]
    assert sums["revisits"].sum() > 0 and 0 < sums["lost"][0, 0] < sums["totals"][0]
    assert row["revisits"] == sums["revisits"].tolist()
    close: Any = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(row["received"], sums["received"] / (2 * heads), **close)
    np.testing.assert_allclose(row["histogram"], sums["histogram"], **close)
    np.testing.assert_allclose([row["totals"][key] for key in LOSSES], sums["totals"], **close)
    for cell, expected in zip(row["cells"], sums["lost"], strict=True):
        assert cell["revisits"] == expected[0]
        np.testing.assert_allclose([cell[key] for key in LOSSES], expected, **close)


def test_queries_before_rope_are_the_projections_of_the_model():
    model = tiny("llama", layers=2)
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda m, i, out: seen.append(out[0].detach()))
        for layer in model.model.layers
    ]
    tokens = prompts(61)[0]
    config = Revisit(policies=("full",), k=9, distance=9.0, scale_below=0, queries=1000)
    trace = Trace("a", tokens[:17], tokens[17:])
    analysis = Setting(config.resolved(), model, Words(), find_ropes(model))
    try:
        row = analyse(analysis, trace, [], pictured=True)
    finally:
        for hook in hooks:
            hook.remove()
    rule = Rule.of(config, len(trace.tokens))
    weights = eager(model, trace.tokens)
    for layer, queries in enumerate(seen):
        heads = queries[17:].view(-1, 4, 16).transpose(0, 1)
        for head, own in enumerate(heads):
            kinds = brute(weights[layer][head], 17, rule, np.zeros((0, 60)))["top-k"]
            units = torch.nn.functional.normalize(own, dim=-1)
            cosine = (units @ units.T).numpy()
            kinds = np.array(kinds)
            apart = ~np.eye(len(kinds), dtype=bool)
            for value, (a, b) in zip(
                row["cosines"][layer][head], ((1, 1), (0, 0), (1, 0)), strict=True
            ):
                pairs = cosine[((kinds == a)[:, None] & (kinds == b)) & apart]
                assert value == pytest.approx(pairs.mean(), abs=1e-4) if len(pairs) else not value
            picture = row["picture"]
            if (layer, head) == (picture["layer"], picture["head"]):
                np.testing.assert_allclose(picture["cosine"], cosine, atol=1e-3)
                assert picture["global"] == kinds.tolist()
                assert picture["positions"] == list(range(17, 60))


@pytest.mark.parametrize("definition", ["top-k", "weighted"])
def test_models_own_sinks_and_soft_caps_count(definition):
    g = torch.Generator().manual_seed(1)
    h, groups, size, d, first = 2, 3, BLOCK + 13, 8, 5
    queries = 2 * torch.randn(h, groups, size, d, generator=g)
    keys = torch.randn(h, size, d, generator=g)
    softmax = LogitTransform(0.4, cap=3.0, sink=torch.randn(h, groups, generator=g))
    times = torch.randint(1, 2 * size, (2, h, size), generator=g, dtype=torch.int32)
    rule = Rule(6, 20.0, definition, 2)
    figures = look(queries, keys, softmax, first, rule, list(times))
    parts = []
    for i in range(h):
        for j in range(groups):
            logits = 3.0 * np.tanh(0.4 * (queries[i, j] @ keys[i].T).double().numpy() / 3.0)
            e = np.exp(logits) * np.tri(size)
            assert softmax.sink is not None
            weights = e / (e.sum(-1, keepdims=True) + math.exp(float(softmax.sink[i, j])))
            parts.append(brute(weights, first, rule, times[:, i].numpy()))
            for k, name in enumerate(("top-k", "weighted")):
                assert figures.by_definition[k, i, j].tolist() == parts[-1][name]
    for name in ("histogram", "received", "revisits", "totals", "lost"):
        expected = sum(part[name] for part in parts)
        np.testing.assert_allclose(getattr(figures, name).numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3, 8, 20])
def test_largest_takes_the_later_of_equals_and_nothing_hidden(k):
    g = torch.Generator().manual_seed(k)
    logits = torch.randint(0, 4, (5, 6, 13), generator=g).float()
    logits[torch.rand(logits.shape, generator=g) < 0.4] = float("-inf")
    logits[0, 0] = float("-inf")
    chosen = largest(logits, k)
    for row, mask in zip(logits.flatten(0, 1).tolist(), chosen.flatten(0, 1).tolist(), strict=True):
        seen = [i for i, x in enumerate(row) if x > -math.inf]
        best = sorted(seen, key=lambda i, row=row: (-row[i], -i))[:k]
        assert [i for i, taken in enumerate(mask) if taken] == sorted(best)


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had that any operation made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.most = max(self.most, one.numel())
        return out


def test_memory_grows_with_the_length_and_not_with_its_square():
    most = []
    for size in (128, 256, 512):
        g = torch.Generator().manual_seed(0)
        queries, keys = (torch.randn(*s, size, 4, generator=g) for s in ((1, 2), (1,)))
        times = [torch.full((1, size), 900, dtype=torch.int32)]
        with Largest() as seen:
            look(queries, keys, LogitTransform(1.0), 0, Rule(150, 200.0, "top-k", 4), times)
        most.append(seen.most)
    assert most[0] == 4 * BLOCK * 128 and most[1] == 2 * most[0] and most[2] == 4 * most[0]


def test_mean_cosines_of_nothing_are_none():
    queries = torch.eye(3)
    assert mean_cosines(queries, torch.tensor([True, False, False])) == [None, 0.0, 0.0]
    assert mean_cosines(queries[:1], torch.tensor([True])) == [None, None, None]


def test_principal_axes_are_those_of_the_covariance():
    g = torch.Generator().manual_seed(3)
    points = torch.randn(40, 6, generator=g) * torch.tensor([5.0, 3.0, 1.0, 1.0, 0.5, 0.1]) + 7
    places, shares = principal(points)
    values, vectors = np.linalg.eigh(np.cov(points.double().numpy().T))
    np.testing.assert_allclose(shares, values[::-1][:2] / values.sum(), rtol=1e-9)
    expected = (points.double() - points.double().mean(0)).numpy() @ vectors[:, ::-1][:, :2]
    np.testing.assert_allclose(np.abs(places.numpy()), np.abs(expected), rtol=1e-6, atol=1e-9)
    assert (places.gather(0, places.abs().argmax(0, keepdim=True)) > 0).all()
    alone, none = principal(torch.ones(1, 6))
    assert alone.tolist() == [[0.0, 0.0]] and none == [0.0, 0.0]


def test_a_sample_is_bounded_evenly_spaced_and_of_the_most_mixed_head():
    sample = Sample(5)
    queries = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
    few = torch.arange(11) < 2
    sample.add(0, 0, queries, few)
    sample.add(1, 3, queries, torch.arange(11) % 4 == 0)
    assert sample.places(11).tolist() == [0, 2, 5, 8, 10]
    assert sample.chosen(None) == (1, 3) and sample.chosen("0.0") == (0, 0)
    with pytest.raises(ValueError, match=r"no query head 1\.0"):
        sample.chosen("1.0")


def test_short_traces_scale_the_rule_and_long_ones_do_not():
    config = Revisit(k=150, distance=200, scale_below=2000)
    assert Rule.of(config, 400) == Rule(30, 40.0, "top-k", 4)
    assert Rule.of(config, 2000) == Rule.of(config, 32000) == Rule(150, 200.0, "top-k", 4)
    assert Rule.of(config, 3).k == 1
    assert Rule.of(replace(config, scale_below=0), 400).distance == 200.0
