"""The memory model against what is allocated, and the bench command end to end."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicies
from kvpolicies import slots, step
from kvpolicies.cli import main
from kvpolicies.config import split_list
from kvpolicies.errors import UserError
from kvpolicies.eval.bench import table as bench_table
from kvpolicies.eval.bench.profiler import PARTS, split
from kvpolicies.eval.bench.replacement import Queue
from kvpolicies.eval.display.bytesize import parse_bytes
from kvpolicies.models import memory, presets
from kvpolicies.policy import Policy
from kvpolicies.registry import resolve
from tests.support.models import prompts, tiny

POLICIES = [
    ("full", "1"),
    ("streaming", "48"),
    ("beacon(n_beacon=4, n_recent=4)", "48"),
    ("beacon(selector='naive_fps', n_beacon=4, n_recent=4)", "48"),
    ("rkv(faithful=True, every=16)", "48"),
    ("h2o", "25%"),
]


def allocated(cache: kvpolicies.FixedBudgetCache) -> int:
    """Bytes of every tensor that the layers hold, found by looking."""
    found: dict[int, int] = {}

    def walk(x: Any) -> None:
        if isinstance(x, torch.Tensor) and x.dim():
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict | list):
            for value in x.values() if isinstance(x, dict) else x:
                walk(value)

    for group in cache.groups:
        for value in vars(group).values():
            walk(value)
    return sum(found.values())


@pytest.mark.parametrize(("policy", "budget"), POLICIES)
def test_predicted_bytes_are_the_bytes_allocated(
    policy: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[kvpolicies.FixedBudgetCache] = []
    original = kvpolicies.FixedBudgetCache.allocate

    def spy(self: Any, *args: Any) -> None:
        original(self, *args)
        made.append(self)

    held = memory.predict(tiny(), policy, budget, 3, 20, 60)
    monkeypatch.setattr(kvpolicies.FixedBudgetCache, "allocate", spy)
    kvpolicies.generate(tiny(), prompts(20, 20, 20), policy, budget, max_new_tokens=60)
    real = allocated(made[-1])
    assert abs(held.cache + held.state - real) <= 0.02 * real
    weights = sum(p.numel() * p.element_size() for p in tiny().parameters())
    assert 0 <= held.weights - weights <= 0.02 * weights  # buffers


def test_the_papers_77_gigabytes_from_the_config_alone() -> None:
    """BeaconKV: Qwen3-4B in bf16, 32K tokens, batch 16, full cache: 77 GB."""
    model = memory.meta_model(presets.preset("qwen3-4b"), torch.bfloat16)
    held = memory.predict(model, "full", "1", 16, 1, 32_767)
    slots = 16 * 32_768 * 36 * 8
    assert held.cache == slots * (2 * 128 * 2 + 4)  # keys, values, positions
    assert abs(held.cache - slots * 4 - 77.3e9) < 0.1e9
    assert held.weights == pytest.approx(8.04e9, rel=0.01)
    assert memory.largest_batch(held, 141 * 10**9) == (141 * 10**9 - held.weights) // held.a_row


@pytest.mark.parametrize("policy", ["full", "streaming", "beacon(n_beacon=4, n_recent=4)", "h2o"])
def test_the_largest_batch_by_arithmetic_is_the_one_that_can_be_allocated(policy: str) -> None:
    held = memory.predict(tiny(), policy, "48", 1, 20, 60)
    for rows in (0, 1, 7, 12):
        room = held.weights + rows * held.a_row + held.a_row // 2
        args = (tiny(), policy, "48", 20, 60, room)
        assert memory.largest_batch_by_allocation(*args, most=64) == rows
        assert memory.largest_batch(held, room) == rows


def test_a_hybrid_models_sliding_layers_do_not_grow() -> None:
    from transformers import GptOssConfig

    config = GptOssConfig(
        num_hidden_layers=4, num_local_experts=2, hidden_size=64, intermediate_size=64,
        vocab_size=100, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        sliding_window=32, max_position_embeddings=65536,
    )  # fmt: skip
    model = memory.meta_model(config, torch.float32)
    short, long = (memory.predict(model, "full", "1", 1, 64, n).cache for n in (1984, 4032))
    full_layers = 2 * 2048 * 2 * (2 * 16 * 4 + 4)
    assert long - short == full_layers


@pytest.mark.parametrize("width", [40, 90, 160, 300])
def test_no_heading_and_no_number_breaks(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", str(width))
    row = {"policy": "beacon(n_beacon=8, n_recent=8)", "first_token_s": 0.25, "fits_tried": None}
    row |= {f"share_{part}": 0.125 for part in PARTS} | {"predicted_bytes": 30_843_136}
    bench_table.print_table([row])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    words = " ".join(lines).split()
    for key in row:
        assert set(key.split("_")) <= set(words)
    assert "30.8 MB" in lines[-1] + lines[-2] and words.count("12.5") == len(PARTS)
    assert {"beacon(n_beacon=8,", "n_recent=8)"} <= set(words)


def test_sinks_and_window_of_a_deployment_are_benched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget of 4 slots cannot have the usual 4 sinks; one budget is one row."""
    file = tmp_path / "deploy.yaml"
    file.write_text("policy: streaming\nbudget: 3\nsinks: 0\nwindow: 2\nmax_new_tokens: 8\n")
    argv = ["bench", str(file), "--predict-only", "--budgets", "4,04,0_5"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["streaming", "4"], ["streaming", "5"]]
    assert main([*argv, "--window", "3"]) == 0
    assert main([*argv, "--window", "4"]) == 2


@pytest.mark.parametrize("option", ["--batch-sizes", "--prompt", "--budgets"])
def test_digits_of_other_scripts_are_no_numbers(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", option, "٤٠"]) == 2
    assert "expected" in capsys.readouterr().err


def test_sizes_and_lists() -> None:
    assert parse_bytes("80GB") == 80 * 10**9 and parse_bytes("1.5 GiB") == 3 << 29
    for bad in ("", "80XB", "-1GB", "0"):
        with pytest.raises(UserError, match="expected a size"):
            parse_bytes(bad)
    assert split_list("full,beacon(n_beacon=8, n_recent=8), rkv") == [
        "full",
        "beacon(n_beacon=8, n_recent=8)",
        "rkv",
    ]


def test_the_clock_accounts_for_a_step_and_puts_everything_back() -> None:
    policy = resolve("snapkv")
    before = (step.slot_attention, slots.compact, type(policy).observe, Policy.evicted)
    with split(policy, torch.device("cpu")) as seconds:
        kvpolicies.generate(tiny(), prompts(20), policy, 48, max_new_tokens=80, eos_token_id=-1)
    assert set(seconds) == set(PARTS)
    assert all(seconds[part] > 0 for part in ("model", "attention", "observe", "score", "compact"))
    assert before == (step.slot_attention, slots.compact, type(policy).observe, Policy.evicted)
    assert "evicted" not in vars(type(policy))


@pytest.fixture
def tiny_config(tmp_path: Path) -> str:
    tiny().config.to_json_file(tmp_path / "config.json")
    return str(tmp_path / "config.json")


def test_bench_measures_resumes_and_refuses_another_load(
    tiny_config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench"
    command = ["bench", "--random", tiny_config, "--budgets", "32,40", "--batch-sizes", "1,2"]
    command += ["--prompt", "8", "--new", "40", "--repeats", "1", "--out", str(out)]
    assert main([*command, "--policies", "transformers,streaming"]) == 0
    lines = (out / "bench.jsonl").read_text().splitlines()
    assert len(lines) == 2 + 4
    (out / "bench.jsonl").write_text("".join(line + "\n" for line in lines[:4]) + lines[4][:30])
    assert main([*command, "--policies", "transformers,streaming"]) == 0
    again = (out / "bench.jsonl").read_text().splitlines()
    assert again[:4] == lines[:4] and len(again) == 6
    with (out / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["policy"] for row in rows} == {"transformers", "streaming"}
    assert all(float(row["tokens_s"]) > 0 for row in rows)
    shares = json.loads(again[-1])["split"]
    assert abs(sum(shares.values()) - 1) < 0.01
    assert (out / "throughput.png").stat().st_size and (out / "memory.png").stat().st_size
    assert main([*command, "--new", "50", "--policies", "streaming"]) == 2
    assert "holds another bench" in capsys.readouterr().err
    (out / "run.json").write_text('{"bench": ')
    assert main([*command, "--policies", "streaming"]) == 2
    assert "run.json: malformed JSON" in capsys.readouterr().err


def test_a_queue_of_requests_is_served_both_ways_and_nothing_is_lost(
    tiny_config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "queue"
    command = ["bench", "--random", tiny_config, "--budgets", "32", "--out", str(out)]
    command += ["--requests", "7", "--tail", "4:30", "--batch-sizes", "3", "--prompt", "8"]
    assert main([*command, "--policies", "streaming"]) == 0
    first = (out / "bench.jsonl").read_text()
    row = json.loads(first)
    lengths = Queue(7, 4, 30, 8, 3).lengths()
    assert len(lengths) == 7 and min(lengths) >= 4 and max(lengths) == 30
    assert row["new_tokens"] == sum(lengths) and row["tokens_s"] > 0
    assert main([*command, "--policies", "streaming,full"]) == 0  # the first is there
    assert (out / "bench.jsonl").read_text().startswith(first)
    with (out / "bench.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(r["policy"], r["budget"]) for r in table] == [("streaming", "32"), ("full", "")]
    assert main([*command, "--policies", "streaming", "--tail", "4:20"]) == 2
    assert "holds another bench (tail 4:30, not 4:20)" in capsys.readouterr().err
    assert (out / "bench.jsonl").read_text().startswith(first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--random", "nosuch"], "no preset"),
        (["--random", "nosuch.json"], "no such file"),
        (["--memory", "much"], "expected a size"),
        (["--batch-sizes", "0"], "whole numbers"),
        (["--policies", "oracle"], "cannot be deployed"),
        (["--new", "2"], "too small"),
        (["--step", "fast"], "expected auto, "),
        (["--requests", "0"], "at least one"),
        (["--tail", "4:9"], "needs --requests"),
        (["--requests", "4", "--policies", "transformers"], "of ours alone"),
        (["--requests", "4", "--policies", "full", "--tail", "9"], "expected shortest:longest"),
        (["--dtype", "float31"], "expected float32"),
        (["--dtype", "float31", "--predict-only"], "expected float32"),
        (["--policies", "", "--predict-only"], "policies: empty"),
        (["--policies", "oracle", "--predict-only"], "cannot be deployed"),
        (["--device", "tpu", "--predict-only"], "expected auto"),
        (["--budgets", "abc"], "expected a number of slots"),
        (["--random", "BROKEN"], "malformed JSON"),
        pytest.param(
            ["--device", "cuda"],
            "no model can be made",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.json").write_text("{")
    options = [str(tmp_path / "broken.json") if word == "BROKEN" else word for word in options]
    assert main(["bench", "--out", str(tmp_path / "o"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "o").exists()
