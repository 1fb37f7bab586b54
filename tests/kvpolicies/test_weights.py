"""A checkpoint that is not whole is refused in one line, whatever is asked of it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvpolicies.cli import main
from kvpolicies.errors import UserError
from kvpolicies.models import embedded, loading

LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model as a folder of one's own."""
    with embedded.assets() as there:
        return Path(shutil.copytree(there, tmp_path / "model"))


def with_weights(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Puts tensors into the checkpoint; None takes one out."""
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **change}
    save_file({k: t for k, t in tensors.items() if t is not None}, file, {"format": "pt"})


def refused(folder: Path, says: str, dtype: str = "float32") -> None:
    with pytest.raises(UserError, match=says) as error:
        loading.load(str(folder), dtype, "cpu")
    assert str(error.value).startswith(f"model {folder}") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({LAYER: None}, rf"lacks 1 tensor: {LAYER}$"),
        (
            dict.fromkeys([LAYER.replace("1", str(i)) for i in range(4)]),
            r"lacks 4 tensors: .*layers\.0\.\S+, .*layers\.2\.\S+ and 1 more",
        ),
        ({"model.embed_tokens.weight": None}, "lacks .* model.embed_tokens.weight"),
        ({LAYER: torch.zeros(3, 3)}, f"holds 1 tensor: {LAYER} in other shapes"),
        ({LAYER.replace("1", "7"): torch.zeros(3)}, r"no place for 1 tensor: model\.layers\.7"),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)},
            r"no place for .*q_proj\.bias",
        ),
        ({LAYER: torch.full((256, 128), float("nan"))}, f"tensor {LAYER} holds NaN or inf"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config(
    folder: Path, change: dict[str, Tensor | None], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with_weights(folder, change)
    refused(folder, says)
    assert "LOAD REPORT" not in capfd.readouterr().err, "transformers' table, before our line"


def test_what_no_layer_would_use_is_left_out(folder: Path) -> None:
    """Heads for training, towers for pictures: a decoder is whole without them."""
    with_weights(folder, {"vision.layers.0.weight": torch.zeros(3), "value_head": torch.zeros(3)})
    loading.load(str(folder), device="cpu")


def test_one_infinity_among_many_numbers(folder: Path) -> None:
    tensor = load_file(folder / "model.safetensors")[LAYER].clone()
    tensor[200, 100] = 1e6  # more than float16 can hold
    with_weights(folder, {LAYER: tensor})
    refused(folder, f"{LAYER} holds NaN or infinity in float16; try --dtype bfloat16", "float16")
    loading.load(str(folder), "bfloat16", "cpu")


def test_weights_that_are_finite_and_logits_that_are_not(folder: Path) -> None:
    with_weights(folder, {"model.norm.weight": torch.full((128,), 3e38)})
    refused(folder, "its logits are not finite in float32, though its weights are")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"num_hidden_layers": 4', '"num_hidden_layers": 3'),
        ('"num_attention_heads": 4', '"num_attention_heads": 0'),
        ('"num_key_value_heads": 2', '"num_key_value_heads": 3'),
        ('"num_key_value_heads": 2', '"num_key_value_heads": 0'),
        ('"head_dim": 32', '"head_dim": 31'),
        ('"hidden_act": "silu"', '"hidden_act": "sillu"'),
        ('"vocab_size": 102', '"vocab_size": 101'),
        ('"rope_theta": 100000.0', '"rope_theta": "large"'),
        ('"rms_norm_eps": 1e-06', '"rms_norm_eps": NaN'),
        ('"model_type": "qwen3"', '"model_type": "bert"'),
        ('"model_type": "qwen3"', '"model_type": "mamba"'),
        ('"model_type": "qwen3"', '"model_type": []'),
    ],
)
def test_configs_that_are_not_the_checkpoints(folder: Path, old: str, new: str) -> None:
    config = folder / "config.json"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    refused(folder, ".")


def test_every_command_refuses_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_weights(folder, {LAYER: None})
    model, out = ["--model", str(folder)], ["--out", str(tmp_path / "out")]
    lines: list[list[Any]] = [
        ["compare", *model, "--policies", "random", "--budgets", "69", "--problems", "1", *out],
        ["generate", *model, "--prompt", "x"],
        ["serve", *model, "--port", "0", "--budget", "64"],
        ["train", "ledger-dms", *model, *out],
        ["revisit", *model, "--problems", "1", *out],
        ["bench", *model, *out],
    ]
    for line in lines:
        assert main(line) == 2, line
        error = capsys.readouterr().err.splitlines()
        assert error[-1].startswith(f"kvpolicies: model {folder}: its checkpoint lacks"), line
    assert not (tmp_path / "out").exists()
