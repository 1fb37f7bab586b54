"""How late the first answer is: what is imported before each refusal, counted in a fresh process.

Seconds depend on the machine; imports do not. torch takes about two of them, transformers three
more, and what needs neither must be refused without either.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpolicies import outline, registry
from kvpolicies.cli import COMMANDS
from kvpolicies.config import KERNELS
from kvpolicies.kernels.backend import CHOICES

HEAVY = {"torch", "transformers", "lightning", "datasets", "matplotlib", "scipy.stats", "pandas",
         "math_verify", "rich", "uvicorn", "huggingface_hub"}  # fmt: skip

SELECT = ["--memory", "1GB", "--batch", "1", "--max-tokens", "9"]

# (arguments, exit status): no model, no torch.
LIGHT: list[tuple[list[str], int]] = [
    *([[], 2], [["--help"], 0], [["--version"], 0], [["nosuch"], 2], [["policies"], 0]),
    *([[name, "--help"], 0] for name in COMMANDS),
    *([[name, "--nosuch"], 2] for name in COMMANDS),
    (["compare", "nofile.yaml"], 2),
    (["compare", "broken.yaml"], 2),
    (["compare", "--policies", "nosuch"], 2),
    (["compare", "--policies", "rkv(mx=2)"], 2),
    (["compare", "--policies", "rkv(mix='a')"], 2),
    (["compare", "--budgets", "x"], 2),
    (["compare", "--task", "nosuch"], 2),
    (["compare", "--temperature", "-1"], 2),
    (["compare", "--model", "./nowhere"], 2),
    (["compare", "--device", "tpu"], 2),
    (["compare", "--out", "broken.yaml"], 2),
    (["compare", "--task", "gsm8k", "--model", "smollm2", "--data", "nofile.jsonl"], 2),
    (["compare", "--task", "gsm8k", "--model", "smollm2", "--data", "broken.yaml"], 2),
    (["compare", "default", "nofile.yaml"], 2),
    (["select", "nowhere", *SELECT], 2),
    (["select", "empty", *SELECT], 2),
    (["select", "empty", "--memory", "much", "--batch", "1", "--max-tokens", "9"], 2),
    (["select", "empty", *SELECT, "--out", "broken.yaml"], 2),
    (["revisit", "--traces", "nofile", "--model", "smollm2"], 2),
    (["revisit", "--policies", "nosuch"], 2),
    (["revisit", "--traces", "empty"], 2),
    (["train", "nofile"], 2),
    (["train", "broken.yaml"], 2),
    (["train", "ledger-kvpop", "--data", "nofile.jsonl"], 2),
    (["train", "ledger-kvpop", "--steps", "0"], 2),
    (["ablate", "nofile"], 2),
    (["ablate", "broken.yaml"], 2),
    (["bench", "nofile.yaml"], 2),
    (["bench", "--policies", "nosuch"], 2),
    (["bench", "--random", "nosuch"], 2),
    (["bench", "--random", "nofile.json"], 2),
    (["bench", "--model", "./nowhere"], 2),
    (["generate"], 2),
    (["generate", "nofile.yaml", "--prompt", "x"], 2),
    (["generate", "--policy", "nosuch", "--prompt", "x"], 2),
    (["generate", "--prompt-file", "nofile"], 2),
    (["generate", "--prompt", "x", "--model", "./nowhere"], 2),
    (["generate", "--prompt", "x", "--trace", "broken.yaml"], 2),
    (["serve", "--policy", "nosuch"], 2),
    (["serve", "--model", "./nowhere"], 2),
    (["serve", "--queue", "-1"], 2),
    (["replay", "nofile"], 2),
    (["replay", "empty"], 2),
]  # type: ignore[assignment]

# What only a policy's class or a file of tensors tells: torch, and no more.
TORCH: list[tuple[list[str], int]] = [
    (["generate", "--policy", "rkv(mix=2)", "--prompt", "x"], 2),
    (["compare", "--policies", "rkv(mix=2)"], 2),
    (["bench", "--policies", "oracle"], 2),
    (["revisit", "--policies", "rkv(mix=2)"], 2),
    (["serve", "--policy", "oracle"], 2),
    (["replay", "broken.yaml"], 2),
]

SCRIPT = """
import contextlib, io, json, sys
from kvpolicies.cli import main
heavy, cases = json.loads(sys.argv[1])
for argv in cases:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as e:
        status = main(argv)
    told = [line for line in e.getvalue().splitlines() if line.startswith("kvpolicies: ")]
    print(json.dumps([status, [name for name in heavy if name in sys.modules], told]))
"""


def answers(cases: list[tuple[list[str], int]], folder: Path) -> list[list]:
    """[status, heavy modules imported by then, messages] of each case, all in one process."""
    (folder / "empty").mkdir()
    (folder / "broken.yaml").write_text("model: [\n")
    asked = json.dumps([sorted(HEAVY), [argv for argv, _ in cases]])
    command = [sys.executable, "-c", SCRIPT, asked]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("cases", "allowed"), [(LIGHT, set()), (TORCH, {"torch"})])
def test_what_needs_no_model_is_refused_before_the_imports(cases, allowed, tmp_path):
    for (argv, wanted), (status, heavy, told) in zip(cases, answers(cases, tmp_path), strict=True):
        assert status == wanted and set(heavy) <= allowed, (argv, status, heavy, told)
        assert len(told) == (status == 2 and argv != []), (argv, told)


FIRST_LINE = """
import sys
from kvpolicies import cli, streams
def tell(message):
    print(message, *sorted({"torch", "transformers"} & set(sys.modules)), sep="|")
    raise KeyboardInterrupt
streams.tell = tell
print(cli.main(sys.argv[1:]))
"""


def test_a_study_says_what_it_does_before_the_imports(tmp_path):
    line = [sys.executable, "-c", FIRST_LINE, "compare", "--problems", "3"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    told, status = done.stdout.splitlines()
    assert status == "130" and "3 " in told and "embedded" in told and "|" not in told


@pytest.mark.parametrize("name", registry.POLICIES)
def test_options_read_from_the_source_are_the_class_s_own(name):
    """`policies` and all checks of options rest on this."""
    target = registry.POLICIES[name]
    module = target.partition(":")[0]
    loaded = sys.modules.pop(module, None)
    try:
        read = outline.read(target)
    finally:
        if loaded is not None:
            sys.modules[module] = loaded
    assert read == outline.outline_of(registry.load(target))


def test_words_that_are_checked_without_torch_are_those_of_the_kernels():
    assert KERNELS == CHOICES
