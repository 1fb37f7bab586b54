"""`kvpolicies calibrate`: statistics of queries, and who may use them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpolicies.cli import main
from kvpolicies.errors import UserError
from kvpolicies.learned.statistics import KEY, QueryStatistics, read_statistics
from kvpolicies.registry import resolve
from kvpolicies.train.calibrate import calibrate
from tests.support.models import prompts, tiny

CPU = torch.device("cpu")


def test_statistics_are_means_of_queries_before_rope() -> None:
    model, texts = tiny("llama"), prompts(7, 12)
    found, seen = calibrate(model, texts), []
    hook = model.model.layers[1].self_attn.q_proj.register_forward_hook(
        lambda _, __, out: seen.append(out[0].view(-1, 2, 2, 16))
    )
    with torch.no_grad():
        for text in texts:
            model(torch.tensor([text]))
    hook.remove()
    queries = torch.cat(seen)  # [T, H, G, D]
    assert found.layers == (0, 1)
    assert found.tokens == len(queries) == 19
    torch.testing.assert_close(found.mean[1], queries.mean(dim=0), rtol=1e-4, atol=1e-5)
    size = torch.hypot(*queries.chunk(2, dim=-1)).mean(dim=0)
    torch.testing.assert_close(found.size[1], size, rtol=1e-4, atol=1e-5)


def test_from_text_to_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "statistics.safetensors"
    out.parent.mkdir()
    command = ["calibrate", "--documents", "2", "--length", "50", "--out", str(out)]
    assert main(command) == 0
    assert "2 documents, 100 tokens" in capsys.readouterr().out
    assert main(command) == 2  # it is there
    assert "--force" in capsys.readouterr().err
    policy = resolve(f"triattention(statistics={str(out)!r})")
    with pytest.raises(UserError, match="its statistics was made for Qwen3ForCausalLM of 4 layers"):
        policy.check_model(tiny())


def test_the_embedded_models_statistics_are_those_of_the_command(tmp_path: Path) -> None:
    """What ships is what `kvpolicies calibrate` writes."""
    assert main(["calibrate", "--out", str(tmp_path / "s.safetensors")]) == 0
    shipped = load_file(resolve("triattention").file)
    for name, tensor in load_file(tmp_path / "s.safetensors").items():
        torch.testing.assert_close(shipped[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "no/such/file.jsonl"], "no such file"),
        (["--documents", "0"], "documents must be at least 1"),
        (["--model", "nowhere/at all/x"], "nowhere"),
        (["--out", "/no/folder/x"], "no such folder"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    tensors = {0: torch.ones(2, 2, 4)}
    QueryStatistics({}, (0,), 3, tensors, {0: torch.ones(2, 2, 2)}).save(good)
    assert read_statistics(good, CPU).tokens == 3
    about = {KEY: json.dumps({"base": {}, "layers": [0, 1], "tokens": 3})}
    for metadata in (about, {}, {KEY: "x"}):
        save_file(load_file(good), bad, metadata=metadata)
        with pytest.raises(UserError, match="not a file that kvpolicies calibrate wrote"):
            read_statistics(bad, CPU)
        bad.unlink()
    QueryStatistics({}, (0,), 3, {0: tensors[0] / 0}, {0: torch.ones(2, 2, 2)}).save(bad)
    with pytest.raises(UserError, match="not finite"):
        read_statistics(bad, CPU)
    bad.write_bytes(b"no safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        read_statistics(bad, CPU)
    with pytest.raises(UserError, match=r"statistics 'gone.safetensors': no such folder"):
        resolve("triattention(statistics='gone.safetensors')").check_model(tiny())
