"""The scorers that come with the package, found by the bare name on the embedded model."""

import csv

import pytest
import torch

import kvpolicies
from kvpolicies.errors import UserError
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.tasks import ledger
from kvpolicies.learned.config import KINDS
from kvpolicies.learned.policy import ASSETS
from kvpolicies.models import embedded
from kvpolicies.registry import ON_REQUEST, resolve
from tests.support.models import prompts, tiny


def test_default_studies_of_the_embedded_model_have_them_and_no_others() -> None:
    assert set(KINDS) - set(ON_REQUEST) <= set(Study().resolved().policies)
    assert set(KINDS) <= set(Study(policies=("all",)).resolved().policies)
    other = Study(model="smollm2", task="fidelity", data="x.jsonl").resolved().policies
    assert not set(KINDS) & set(other) and "beacon" in other


@pytest.mark.parametrize("name", KINDS)
def test_it_runs_on_the_embedded_model_whatever_its_company(name: str) -> None:
    model, tokenizer = embedded.load()
    problem = ledger.make_problem(0, length=300)
    prompt = tokenizer(problem.prompt)["input_ids"]
    (made,) = kvpolicies.generate(model, [prompt], name, 69, max_new_tokens=40)
    assert made.max_slots == 69 and made.state_bytes > 0
    again = kvpolicies.generate(model, [prompt, prompt[:40]], name, 69, max_new_tokens=40)
    assert again[0].tokens == made.tokens


def test_another_model_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="made for Qwen3ForCausalLM of 4 layers"):
        kvpolicies.generate(tiny(), prompts(20), "kvpop", 69, max_new_tokens=4)


def test_what_ships_is_small() -> None:
    files = [file for file in ASSETS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 2 << 20


@pytest.mark.parametrize("name", KINDS)
def test_its_curves_rise_above_chance(name: str) -> None:
    with (ASSETS / name / "figures.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    gained = torch.tensor([float(row["recall"]) - float(row["chance"]) for row in last])
    assert len(last) == 4 * 2 * 3 and gained.mean() > 0.3
    assert resolve(name).config.kind == name
