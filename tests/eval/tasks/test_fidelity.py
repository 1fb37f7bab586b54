"""Fidelity: the formulas, the cut into units, and a policy that evicts nothing."""

import json
import math
from dataclasses import replace

import pytest
import torch

from kvpolicies.eval import report
from kvpolicies.eval.study import run
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.results import NAME, read_rows
from kvpolicies.eval.tasks import fidelity, ledger
from kvpolicies.eval.tasks.fidelity import PredictionScorer, split_units
from kvpolicies.models import loading
from tests.support.rows import untimed


def test_scores_against_the_formulas():
    torch.manual_seed(0)
    full, other = torch.randn(5, 11), torch.randn(5, 11)
    forced = [[3, 1, 4, 1, 5]]
    reference = PredictionScorer(forced)
    scorer = PredictionScorer(forced, reference)
    for step in range(5):
        reference.on_logits(0, step, full[step])
    for step in range(5):
        scorer.on_logits(0, step, other[step])
    p, q = full.double().softmax(-1), other.double().softmax(-1)
    grades = scorer.grades(0)
    nll = -q[range(5), forced[0]].log().mean().item()
    assert grades["nll"] == pytest.approx(nll, abs=1e-6)
    assert grades["kl"] == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), abs=1e-6)
    assert grades["top1"] == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    own = reference.grades(0)
    assert own["kl"] == pytest.approx(0, abs=1e-7) and own["top1"] == 1


def test_full_gives_its_distribution_before_the_loop_reuses_the_logits():
    reference = PredictionScorer([[0, 1]])
    buffer = torch.tensor([1.0, 2.0])
    reference.on_logits(0, 0, buffer)
    buffer.fill_(0)
    reference.on_logits(0, 1, buffer)
    assert reference._log_probs[0][0][0] != reference._log_probs[0][1][0]


def test_units_are_blocks_in_order():
    assert split_units([5] * 7, 3, None) == [range(3), range(3, 6), range(6, 7)]
    assert split_units([], 3, None) == []


def test_units_keep_the_distributions_within_memory(monkeypatch):
    monkeypatch.setattr(fidelity, "MOST_BYTES", 4 * 100 * 10)
    blocks = split_units([4, 4, 4, 50, 4], 8, 100)
    assert blocks == [range(2), range(2, 3), range(3, 4), range(4, 5)]


@pytest.fixture(scope="module")
def forced_runs():
    """Full, streaming without and with evictions, on ledger traces of the embedded model."""
    from kvpolicies.decoding import generate
    from kvpolicies.models import embedded

    model, tokenizer = embedded.load()
    problems = [ledger.make_problem(seed, length=70) for seed in range(2)]
    prompts = [tokenizer.encode(p.prompt, add_special_tokens=False) for p in problems]
    forced = [tokenizer.encode(p.trace, add_special_tokens=False) for p in problems]
    full = PredictionScorer(forced)
    runs = {"full": full}
    for name, policy, budget in (
        ("full", "full", "100%"),
        ("everything", "streaming", "100%"),
        ("half", "streaming", "50%"),
    ):
        scorer = full if name == "full" else PredictionScorer(forced, full)
        generate(
            model,
            prompts,
            policy,
            budget,
            max_new_tokens=[len(tokens) for tokens in forced],
            forced=forced,
            on_logits=scorer.on_logits,
        )
        runs[name] = scorer
    return runs


@pytest.mark.parametrize("problem", [0, 1])
def test_without_evictions_a_policy_predicts_what_full_predicts(forced_runs, problem):
    grades, full = forced_runs["everything"].grades(problem), forced_runs["full"].grades(problem)
    assert abs(grades["kl"]) < 1e-5
    assert grades["top1"] == 1
    assert grades["nll"] == pytest.approx(full["nll"], abs=1e-5)


@pytest.mark.parametrize("problem", [0, 1])
def test_evictions_show(forced_runs, problem):
    assert forced_runs["half"].grades(problem)["kl"] > 1e-3


@pytest.fixture
def as_text(monkeypatch, tmp_path):
    """A fidelity study on ledger traces given as text, with the embedded model under a name."""
    model = loading.load("embedded", device="cpu")
    monkeypatch.setattr(loading, "load", lambda *_: model)
    problems = [ledger.make_problem(seed, length=60) for seed in range(3)]
    lines = [
        {"id": f"t{i}", "problem": problem.prompt, "solution": problem.trace}
        for i, problem in enumerate(problems)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(line) for line in lines))
    return Study(
        model="text",
        task="fidelity",
        data=str(data),
        policies=("streaming", "beacon"),
        budgets=("50%", "25%"),
        max_new_tokens=20,
        batch_size=2,
        out=str(tmp_path / "out"),
    )


def test_a_fidelity_study_from_end_to_end(as_text):
    folder = run.run_study(as_text)
    rows = read_rows(folder / NAME)
    assert len(rows) == 3 * 5
    assert [row["policy"] for row in rows[:3]] == ["full", "full", "streaming"]
    for row in rows:
        assert row["length"] == 20
        if row["policy"] == "full":
            assert abs(row["kl"]) < 1e-6 and row["top1"] == 1
        else:
            share = {"50%": 0.5, "25%": 0.25}[row["budget"]]
            assert row["slots"] == math.ceil(share * (row["prompt_tokens"] + 20))
            assert row["max_slots"] == row["slots"]
    summaries = report.write_report(folder, as_text.resolved()).cells
    page = (folder / report.NAME).read_text()
    assert "fed token by token" in page and "Budgets are shares" in page
    assert {(folder / name).exists() for name in ("kl.png", "nll.png", "top1.png")} == {True}
    assert summaries[0].values["kl"].value == pytest.approx(0, abs=1e-6)


def test_a_fidelity_unit_is_finished_with_full_recomputed(as_text):
    folder = run.run_study(as_text)
    lines = (folder / NAME).read_bytes().splitlines(keepends=True)
    (folder / NAME).write_bytes(b"".join(lines[:9] + lines[10:]))
    run.run_study(as_text)
    [again] = (folder / NAME).read_bytes().splitlines()[-1:]
    before, after = json.loads(lines[9]), json.loads(again)
    assert untimed(before) == untimed(after)


def test_a_policy_that_looks_ahead_needs_nothing_more(as_text):
    study = replace(as_text, policies=("oracle",), budgets=("50%",))
    folder = run.run_study(study)
    modes = {row["policy"]: row.get("mode") for row in read_rows(folder / NAME)}
    assert modes == {"full": None, "oracle": "looks ahead"}
    report.write_report(folder, study.resolved())
    assert "† looks ahead in the recorded full run" in (folder / report.NAME).read_text()
