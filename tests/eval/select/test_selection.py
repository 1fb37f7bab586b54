"""The bounds, the power computation and the rule of `select`, against simulated studies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kvpolicies.eval.select.benches import Bench, Measured
from kvpolicies.eval.select.candidates import Candidate, Figures, pareto
from kvpolicies.eval.select.decision import CHOSEN, NONE, UNDECIDED, Choice, Constraints, choose
from kvpolicies.eval.select.evidence import Evidence
from kvpolicies.eval.select.power import need, problems_needed
from kvpolicies.eval.select.sources import StudyFolder
from kvpolicies.eval.stats.bounds import draw_means, lower, mean_over_tasks, upper
from kvpolicies.eval.stats.intervals import Interval
from kvpolicies.eval.study.config import Cell, Study
from kvpolicies.models.memory import Memory

FULL = Cell("full", "full")


def made(*benches: dict[str, np.ndarray], held: dict[str, int] | None = None):
    """(evidence, candidates) of made-up grades: {"full": [P, S], "a": [P, S], ...} a bench."""
    names = list(benches[0])
    cell_of = {name: FULL if name == "full" else Cell(name, "1") for name in names}
    kept = []
    for number, grades in enumerate(benches):
        blank = np.zeros_like(grades["full"], dtype=int)
        cells = {
            cell_of[name]: Measured(x.astype(float), blank, blank, blank, blank > 0, 0.0)
            for name, x in grades.items()
        }
        problems = tuple(str(i) for i in range(len(blank)))
        kept.append(Bench(f"task {number}", problems, blank.shape[1], 10, cells))
    source = StudyFolder("folder", Study(), (), "", len(kept[0].problems), "", None)
    evidence = Evidence((source,), tuple(kept), tuple(cell_of.values()), {})
    candidates = []
    for place, name in enumerate(names):
        mean = float(np.mean([grades[name].mean() for grades in benches]))
        figures = Figures(Interval(mean, math.nan, math.nan), Interval(0.0, math.nan, math.nan))
        size = (held or {}).get(name, 1000 if name == "full" else 100 + 10 * place)
        candidates.append(
            Candidate(cell_of[name], "1", Memory(1, 50, size, 0, 0), {}, figures, 0.0)
        )
    return evidence, candidates


def verdict(
    *benches: dict[str, np.ndarray], held: dict[str, int] | None = None, **limits
) -> Choice:
    return choose(*made(*benches, held=held), Constraints(**limits))


def ones(problems: int, wrong: int = 0) -> np.ndarray:
    """[P, 1] of which the first `wrong` are 0."""
    return (np.arange(problems) >= wrong).astype(float)[:, None]


@pytest.mark.parametrize(("right", "n"), [(24, 24), (20, 24), (150, 200), (0, 30)])
def test_the_bound_is_clopper_and_pearsons_for_right_and_wrong(right, n):
    values = ones(n, n - right).T
    low = lower(draw_means(values, 0.0, 0.05, seed=0), 0.05)[0]
    high = upper(draw_means(values, 1.0, 0.05, seed=0), 0.05)[0]
    exact_low = stats.beta.ppf(0.05, right, n - right + 1) if right else 0.0
    exact_high = stats.beta.ppf(0.95, right + 1, n - right) if right < n else 1.0
    assert low == pytest.approx(exact_low, abs=0.01)
    assert high == pytest.approx(exact_high, abs=0.01)


@pytest.mark.parametrize(("lost", "won", "n"), [(0.03, 0.0, 24), (0.06, 0.02, 60), (0.5, 0.4, 30)])
def test_the_bound_lies_above_the_truth_in_at_most_5_of_100_studies(lost, won, n):
    rng = np.random.default_rng(3)
    x = rng.choice([-1.0, 0.0, 1.0], p=[lost, 1 - lost - won, won], size=(1500, n))
    low = lower(draw_means(x, -1.0, 0.05, seed=0), 0.05)
    assert (low > won - lost + 1e-12).mean() <= 0.05


def test_bounds_near_a_bootstrap_with_many_problems():
    rng = np.random.default_rng(0)
    x = rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.8, 0.1], size=(1, 2000))
    low = lower(draw_means(x, -1.0, 0.025, seed=1), 0.025)[0]
    normal = x.mean() - 1.96 * x.std() / math.sqrt(2000)
    assert low == pytest.approx(normal, abs=0.002)


@pytest.mark.parametrize(
    ("lost", "won", "loss", "level"),
    [(0.01, 0.01, 0.03, 0.05), (0.05, 0.05, 0.05, 0.01), (0.02, 0.0, 0.1, 0.05)],
)
def test_the_problems_asked_for_are_enough_and_not_many_times_too_many(lost, won, loss, level):
    rng = np.random.default_rng(5)
    spread = math.sqrt(lost + won - (won - lost) ** 2)

    def passing(n: int) -> float:
        x = rng.choice([-1.0, 0.0, 1.0], p=[lost, 1 - lost - won, won], size=(200, n))
        return float((lower(draw_means(x, -1.0, level, seed=0), level) >= -loss).mean())

    enough = problems_needed(spread, won - lost + loss, 1 + won - lost, level)
    assert passing(enough) >= 0.75
    assert passing(enough // 3) < 0.6


def test_no_differing_problem_needs_what_the_rule_of_three_says():
    found = need([np.zeros((24, 1))], -0.03, -1.0, 0.05)
    assert found is not None and found.problems == 100 and found.samples is None
    assert need([np.full((24, 1), -0.1)], -0.03, -1.0, 0.05) is None


def test_samples_help_only_where_problems_agree_with_themselves():
    rng = np.random.default_rng(0)
    noise = rng.choice([-1.0, 1.0], size=(400, 4))  # all within a problem
    found = need([noise - noise.mean() + 0.0], -0.1, -1.0, 0.05)
    assert found is not None and found.problems > 400 and found.samples == 8
    fixed = np.repeat(noise[:, :1], 4, axis=1)  # all between problems
    found = need([fixed - fixed.mean()], -0.1, -1.0, 0.05)
    assert found is not None and found.samples is None


def test_a_candidate_that_violates_is_chosen_in_at_most_5_of_100_studies():
    rng = np.random.default_rng(11)
    problems, studies, loss = 60, 120, 0.041
    wrong = perfect = 0
    for _ in range(studies):
        grades = {name: (rng.random((problems, 1)) >= loss).astype(float) for name in "abcde"}
        perfect += any(x.all() for x in grades.values())
        found = verdict({"full": ones(problems), **grades}, largest_loss=0.04)
        wrong += found.winner is not None and not found.winner.is_full
    assert wrong / studies <= 0.05
    assert perfect / studies > 0.2, "where a bootstrap of problems would be sure of no loss"


def test_a_winner_that_falls_short_of_the_best_is_declared_in_at_most_5_of_100_studies():
    rng = np.random.default_rng(12)
    studies, wrong = 120, 0
    for _ in range(studies):
        right = {"full": 0.5, "a": 0.86, "b": 0.80, "c": 0.80}  # tolerance 5 points
        grades = {name: (rng.random((100, 1)) < p).astype(float) for name, p in right.items()}
        found = verdict(grades, memory=10**6, tolerance=0.05)
        assert found.winner is not None
        wrong += found.verdict == CHOSEN and found.winner.cell.policy != "a"
    assert wrong / studies <= 0.05


def test_what_is_plainly_good_enough_is_chosen():
    rng = np.random.default_rng(13)
    full = (rng.random((400, 1)) < 0.9).astype(float)
    grades = {"full": full, "dear": full, "cheap": full.copy(), "bad": 1 - full}
    found = verdict(grades, held={"dear": 300, "cheap": 200, "bad": 100}, largest_loss=0.03)
    assert found.verdict == CHOSEN and found.winner and found.winner.cell.policy == "cheap"
    clear = {"full": ones(200, 150), "a": ones(200, 10)}
    assert verdict(clear, memory=10**6).winner.cell.policy == "a"  # type: ignore[union-attr]
    assert verdict(clear, memory=10**6).verdict == CHOSEN


def test_the_worst_task_decides():
    good, bad = {"full": ones(300), "a": ones(300)}, {"full": ones(300), "a": ones(300, 60)}
    assert verdict(good, good, largest_loss=0.05).winner.cell.policy == "a"  # type: ignore
    found = verdict(good, bad, largest_loss=0.05)
    assert found.winner is not None and found.winner.is_full
    assert [test.passes for test in found.tests[Cell("a", "1")]] == [True, False]


def test_equal_bytes_are_decided_by_accuracy():
    grades = {"full": ones(400), "a": ones(400, 4), "b": ones(400, 2)}
    found = verdict(grades, held={"a": 1000, "b": 1009, "full": 2000}, largest_loss=0.05)
    assert found.verdict == CHOSEN and found.winner and found.winner.cell.policy == "b"
    assert [c.cell.policy for c in found.equals] == ["a"]
    found = verdict(grades, held={"a": 1000, "b": 1011, "full": 2000}, largest_loss=0.05)
    assert found.winner and found.winner.cell.policy == "a" and not found.equals


def test_undecided_and_none():
    few = {"full": ones(24), "a": ones(24), "b": ones(24, 12)}
    found = verdict(few, memory=500, largest_loss=0.03)  # full does not fit
    assert found.verdict == UNDECIDED and found.winner and found.winner.cell.policy == "a"
    lacking = found.tests[Cell("a", "1")][0].need
    assert lacking is not None and 100 < lacking.problems < 200  # two candidates: level 0.025
    bad = {"full": ones(24), "b": ones(24, 12)}
    assert verdict(bad, memory=500, largest_loss=0.03).verdict == NONE
    assert verdict(few, memory=10, largest_loss=0.03).verdict == NONE
    rivals = verdict({**few, "c": ones(24, 1)}, memory=500)
    assert rivals.verdict == UNDECIDED and rivals.winner and rivals.winner.cell.policy == "a"
    assert [r.candidate.cell.policy for r in rivals.rivals] == ["c"]
    assert rivals.rivals[0].upper > 0.03 and rivals.rivals[0].need is not None


def test_the_pareto_set_holds_what_nothing_beats():
    grades = {"full": ones(10), "a": ones(10, 5), "b": ones(10, 5), "c": ones(10, 8)}
    _, candidates = made(grades, held={"a": 10, "b": 20, "c": 30, "full": 40})
    assert [c.cell.policy for c in pareto(candidates)] == ["a", "full"]


def test_the_mean_over_tasks_weighs_tasks_alike():
    found = mean_over_tasks([np.ones(10), np.array([0.0, 1.0] * 50)], seed=0)
    assert found.value == pytest.approx(0.75)
    assert found.low == pytest.approx(0.75 - 0.5 * 1.96 * 0.05, abs=0.01)
    assert math.isnan(mean_over_tasks([np.ones(1), np.ones(5)], seed=0).low)
