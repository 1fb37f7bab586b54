"""Published weights become scorers that score as their authors' modules do."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from kvpolicies.cli import main
from kvpolicies.errors import UserError
from kvpolicies.learned.importing import read_published
from kvpolicies.learned.scorer import Scorer
from kvpolicies.models import embedded
from tests.support.models import tiny

E, H, G, LAYERS = 64, 2, 2, 2
ATTENTION = "model.layers.{}.self_attn."


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trimkv(folder: Path, e: int = E, h: int = H, layers: int = LAYERS) -> dict[str, Tensor]:
    gate = ATTENTION + "retention_gate."
    shapes = {"linear1.weight": (24, e), "linear1.bias": (24,), "linear2.weight": (h, 24),
              "bias": (h,)}  # fmt: skip
    made = {
        gate.format(y) + name: drawn(*shape, seed=100 * y + i)
        for y in range(layers)
        for i, (name, shape) in enumerate(shapes.items())
    }
    torch.save(made, folder / "trimkv_weights.pth")
    return made


def kvzap(folder: Path, hidden: int = 0) -> dict[str, Tensor]:
    pairs = [(".0", hidden, E), (".2", H, hidden)] if hidden else [("", H, E)]
    made = {}
    for y in range(LAYERS):
        for i, (name, out, size) in enumerate(pairs):
            made[f"layers.{y}{name}.weight"] = drawn(out, size, seed=10 * y + i)
            made[f"layers.{y}{name}.bias"] = drawn(out, seed=50 + y + i)
    save_file(made, folder / "model.safetensors")
    return made


def fastkvzip(folder: Path) -> list[dict[str, Tensor]]:
    layers = [
        {
            "q_proj.weight": drawn(H * G * 16, E, seed=y), "q_proj.bias": drawn(H * G * 16, seed=y),
            "k_proj.weight": drawn(H * 16, E, seed=9 + y), "q_norm.weight": 1 + drawn(16, seed=y),
            "k_norm.weight": 1 + drawn(16, seed=5 + y), "k_base": drawn(H, 1, 16, 16, seed=y),
            "b": drawn(H, 1, G, seed=y),
        }
        for y in range(LAYERS)
    ]  # fmt: skip
    torch.save({"module": layers}, folder / "q2_dim16_sink16.pt")
    return layers


def dms(folder: Path, **config: Any) -> dict[str, Tensor]:
    made = {}
    for y in range(LAYERS):
        before = ATTENTION.format(y)
        made[before + "dms_proj_alpha.weight"] = 0.01 * drawn(H, E, seed=y)
        made[before + "dms_proj_alpha_norm.weight"] = 1 + 0.3 * drawn(E, seed=7 + y)
        made[before + "q_proj.weight"] = drawn(3, 3)  # of the model, and left alone
    save_file(made, folder / "model-00001-of-00001.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return made


def scores(scorer: Scorer, y: int, x: Tensor) -> Tensor:
    """[H, S] of inputs [S, E]; dms' are read one token later."""
    keys = torch.zeros(1, H, len(x), 16)
    return scorer.scores(y, keys, keys, x[None])[0]


def test_trimkv(tmp_path: Path) -> None:
    made, x = trimkv(tmp_path), drawn(9, E, seed=3)
    scorer = read_published("trimkv", tmp_path, tiny())
    for y in range(LAYERS):
        w1, b1, w2, bias = _gate(made, y)
        expected = F.logsigmoid(F.silu(x @ w1.T + b1) @ w2.T + bias).T
        torch.testing.assert_close(scores(scorer, y, x), expected, rtol=1e-4, atol=1e-5)


def _gate(made: dict[str, Tensor], y: int) -> list[Tensor]:
    before = ATTENTION.format(y) + "retention_gate."
    return [made[before + n] for n in ("linear1.weight", "linear1.bias", "linear2.weight", "bias")]


@pytest.mark.parametrize("hidden", [0, 12])
def test_kvzap(tmp_path: Path, hidden: int) -> None:
    made, x = kvzap(tmp_path, hidden), drawn(9, E, seed=3)
    scorer = read_published("kvzap", tmp_path / "model.safetensors", tiny())
    for y in range(LAYERS):
        if hidden:
            first = x @ made[f"layers.{y}.0.weight"].T + made[f"layers.{y}.0.bias"]
            expected = F.gelu(first) @ made[f"layers.{y}.2.weight"].T + made[f"layers.{y}.2.bias"]
        else:
            expected = x @ made[f"layers.{y}.weight"].T + made[f"layers.{y}.bias"]
        torch.testing.assert_close(scores(scorer, y, x), expected.T, rtol=1e-4, atol=1e-4)


def test_fastkvzip(tmp_path: Path) -> None:
    layers, x = fastkvzip(tmp_path), 0.3 * drawn(9, E, seed=3)
    scorer = read_published("fastkvzip", tmp_path, tiny())

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / (v.square().mean() + 1e-6).sqrt() * weight

    for y, w in enumerate(layers):
        for h in range(H):
            for t in range(len(x)):
                found = []
                k = norm((w["k_proj.weight"] @ x[t])[16 * h : 16 * h + 16], w["k_norm.weight"])
                for g in range(G):
                    at = 16 * (h * G + g)
                    q = (w["q_proj.weight"] @ x[t] + w["q_proj.bias"])[at : at + 16]
                    q = norm(q, w["q_norm.weight"])
                    own = q @ k / 4 + w["b"][h, 0, g]
                    total = sum(math.exp(q @ s / 4 - own) for s in w["k_base"][h, 0])
                    found.append(1 / (1 + total))
                expected = sum(found) / G
                gate = scores(scorer, y, x)[h, t].exp().item()
                assert gate == pytest.approx(expected, rel=1e-3)


def test_dms_norm_scale_and_offset_are_folded_in(tmp_path: Path) -> None:
    made = dms(tmp_path, dms_alpha_scale=80.0, dms_initial_alpha_offset=3.0)
    model, hidden = deepcopy(tiny()), drawn(9, E, seed=3)
    with torch.no_grad():
        for y in range(LAYERS):
            model.model.layers[y].input_layernorm.weight.copy_(1 + 0.2 * drawn(E, seed=20 + y))
    scorer = read_published("dms", tmp_path, model)
    plain = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for y in range(LAYERS):
        before = ATTENTION.format(y)
        theirs = plain * made[before + "dms_proj_alpha_norm.weight"]
        logits = 80 * theirs @ made[before + "dms_proj_alpha.weight"].T - 3
        x = plain * model.model.layers[y].input_layernorm.weight.detach()
        found = scores(scorer, y, x)[:, :-1]  # the logit at t is about token t - 1
        torch.testing.assert_close(found, -logits.T[:, 1:], rtol=1e-3, atol=1e-3)


def test_from_the_command_to_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = embedded.load()
    config = model.config
    sizes: Any = (config.hidden_size, config.num_key_value_heads, config.num_hidden_layers)
    trimkv(tmp_path, *sizes)
    command = ["import", "trimkv", str(tmp_path), "--model", "embedded", "--out"]
    assert main([*command, str(tmp_path / "made")]) == 0
    assert f"trimkv(scorer={str(tmp_path / 'made')!r})" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "made")]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "make", "said"),
    [
        ("kvpop", trimkv, "no layout of its authors is public"),
        ("snapkv", trimkv, "no published weights of 'snapkv'"),
        ("kvzap", trimkv, "lacks tensor layers.0.weight"),
        ("trimkv", kvzap, "lacks tensor model.layers.0.self_attn.retention_gate.linear1.weight"),
        ("trimkv", lambda f: trimkv(f, e=48), r"is \[24, 48\], the model wants \[24, 64\]"),
        ("trimkv", lambda f: trimkv(f, layers=1), "lacks tensor model.layers.1"),
        ("dms", trimkv, "dms_separate_alpha"),
        ("trimkv", lambda f: (f / "x.pth").write_bytes(b"junk"), "no file of tensors"),
        ("kvzap", lambda f: (f / "x.safetensors").write_bytes(b"junk"), "cannot be read"),
        ("trimkv", lambda f: None, "holds no .safetensors"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, kind: str, make: Any, said: str) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match=said):
        read_published(kind, tmp_path, tiny())
