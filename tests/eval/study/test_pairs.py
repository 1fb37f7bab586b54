"""Comparisons and their power: against simulation, and in the files that a study leaves."""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from kvpolicies.eval.report import analysis
from kvpolicies.eval.report import findings as words
from kvpolicies.eval.stats import intervals as stats
from kvpolicies.eval.stats import power
from kvpolicies.eval.study import pairs
from kvpolicies.eval.study.config import Study

STUDY = Study(
    policies=("streaming", "random"), budgets=("40", "60"), samples=4, temperature=0.6
).resolved()


def rows_of(policy, budget, correct):
    """`correct` is [P, n] of zeros and ones."""
    shared = {
        "lookups_right": 3, "lookups": 4, "finish": "stop", "length": 10, "slots": 40,
        "max_slots": 40, "cache_bytes": 2048, "state_bytes": 0, "seconds": 0.1, "tokens": [1],
    }  # fmt: skip
    return [
        {"policy": policy, "budget": budget, "problem": f"p{i}", "sample": s,
         "correct": int(right), **shared}
        for i, samples in enumerate(correct) for s, right in enumerate(samples)
    ]  # fmt: skip


def made(seed=0):
    rng = np.random.default_rng(seed)
    chance = rng.beta(1, 1, 12)[:, None]

    def draw(loss):
        return rng.random((12, 4)) < chance * (1 - loss)

    rows = rows_of("full", "full", draw(0))
    for budget in STUDY.budgets:
        rows += rows_of("streaming", budget, draw(0.1))
        rows += rows_of("random", budget, draw(0.9))
    return rows


def test_every_pair_of_a_budget_is_there_once():
    found = pairs.compare(STUDY, made())
    assert [(p.budget, p.a, p.b) for p in found] == [
        (budget, *names)
        for budget in ("40", "60")
        for names in (("streaming", "full"), ("random", "full"), ("streaming", "random"))
    ]
    assert all(p.problems == 12 and p.samples == 48 for p in found)
    assert [p.p_holm for p in found] == stats.holm([p.p for p in found])
    assert found[1].told_apart and found[1].difference.value < 0 and found[1].difference.high < 0
    assert not found[0].told_apart


def test_a_pair_agrees_with_its_cell_and_the_order_of_rows_is_nothing():
    rows = made()
    found, shuffled = analysis.analyse(STUDY, rows), analysis.analyse(STUDY, rows[::-1])
    assert found.cells == shuffled.cells and str(found.pairs) == str(shuffled.pairs)
    cell = next(c for c in found.cells if (c.policy, c.budget) == ("random", "60"))
    pair = next(p for p in found.pairs if (p.a, p.b, p.budget) == ("random", "full", "60"))
    assert cell.differences["correct"] == pair.difference
    assert list(cell.pass_at) == [2, 4]
    assert cell.values["correct"].value <= cell.pass_at[2].value <= cell.pass_at[4].value


def test_only_samples_that_both_have_are_paired():
    rows = [r for r in made() if (r["policy"], r["sample"]) != ("streaming", 3)]
    found = pairs.compare(STUDY, rows)[0]
    three = [r for r in rows if r["sample"] < 3]
    assert found.samples == 36
    assert found.difference == pairs.compare(STUDY, three)[0].difference


def test_files(tmp_path):
    found = analysis.analyse(STUDY, made())
    analysis.write(tmp_path, STUDY, found)
    with (tmp_path / pairs.NAME).open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 6 and {t["policy_b"] for t in table} == {"full", "random"}
    assert all(float(t["low"]) <= float(t["difference"]) <= float(t["high"]) for t in table)
    assert all(0 < float(t["p"]) <= float(t["p_holm"]) <= 1 for t in table)
    with (tmp_path / "summary.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert all(0 <= float(c["pass_at_4"]) <= float(c["pass_at_4_high"]) <= 1 for c in cells)
    record = json.loads((tmp_path / analysis.NAME).read_text())
    assert record["comparisons"] == 6 and len(record["cells"]) == 5
    assert found.power is not None
    assert record["power"]["detectable"] == found.power.detectable
    assert record["power"]["needed"]["4"] > 12


def test_words_say_what_could_be_told():
    text = " ".join(words.compared(STUDY, analysis.analyse(STUDY, made())))
    assert "all 6 comparisons" in text
    assert "With 12 problems and 4 samples each, a true difference of" in text
    found = analysis.analyse(STUDY, made())
    assert found.power is not None
    large = replace(found, power=replace(found.power, detectable=1.54))
    none = words.compared(STUDY, large)[1]
    assert "no difference, however large, is detected" in none and "154" not in none
    same = rows_of("full", "full", np.ones((3, 4))) + rows_of("random", "40", np.ones((3, 4)))
    found = analysis.analyse(STUDY, same)
    assert found.power is None and found.pairs[0].p == 1
    assert "is not known" in words.compared(STUDY, found)[1]
    assert words.compared(STUDY, analysis.analyse(STUDY, [])) == []


def simulated(rng, problems, samples, gap):
    """Two policies' right answers [problems, samples], `gap` apart, problems of all kinds."""
    chance = rng.beta(2, 2, (problems, 1)) * (1 - gap)
    shift = gap + rng.choice((-0.1, 0.1), (problems, 1)) * (1 - gap)
    one = rng.random((problems, samples)) < chance
    two = rng.random((problems, samples)) < np.clip(chance + shift, 0, 1)
    return two.astype(int), one.astype(int)


def test_the_spread_is_that_of_the_simulation():
    rng = np.random.default_rng(0)
    two, one = simulated(rng, 10000, 4, 0.0)
    found = power.spread((two - one).tolist(), two.mean(1), one.mean(1))
    # Variances of Bernoulli draws within a problem, both policies'; of the shift between problems.
    chance = rng.beta(2, 2, 200000)
    shifted = np.clip(chance + rng.choice((-0.1, 0.1), 200000), 0, 1)
    within = np.mean(chance * (1 - chance) + shifted * (1 - shifted))
    assert found.within == pytest.approx(within, rel=0.03)
    assert found.between == pytest.approx(np.var(shifted - chance), rel=0.25)
    assert found.variance(4) == pytest.approx(np.var((two - one).mean(1)), rel=0.02)
    assert 0 < found.correlation < 1


@pytest.mark.parametrize(("samples", "gap"), [(4, 0.3), (4, 0.15), (1, 0.15), (16, 0.1)])
def test_what_is_detectable_is_detected_four_times_in_five(samples, gap):
    """The note's promise, by the sign-flip test that it speaks of: never less than 0.8."""
    rng, count = np.random.default_rng(1), 1000
    two, one = simulated(rng, 100000, samples, gap)
    gaps = two - one
    within = gaps.var(axis=1, ddof=1).mean() if samples > 1 else math.nan
    means = gaps.mean(1).var()
    found = power.Spread(means - within / samples if samples > 1 else means, within, math.nan)
    true = float(gaps.mean())
    problems = found.problems(true, samples)
    assert problems is not None
    assert found.detectable(problems, samples) <= true < found.detectable(problems - 1, samples)
    told = 0
    for _ in range(count):
        two, one = simulated(rng, problems, samples, gap)
        told += stats.sign_flip((two - one).sum(1).tolist(), seed=0) < power.ALPHA
    # A binomial of 1000 at 0.8 has a standard deviation of 1.3 %.
    assert power.CHANCE - 0.026 <= told / count <= power.CHANCE + 0.1


def test_one_sample_a_problem_cannot_separate_the_variances():
    found = power.spread([[1], [0], [0], [-1]], [1, 0, 0, 0], [0, 0, 0, 1])
    assert math.isnan(found.within) and found.variance(1) == pytest.approx(2 / 3)
    assert list(power.needed(found, 1)) == [1]
    assert found.problems(0.03, 4) is None
