"""The ledger task: one right trace, lengths in range, grades that survive any output."""

import pytest

from kvpolicies.errors import UserError
from kvpolicies.eval.tasks import ledger


def simulate(prompt: str) -> list[str]:
    """The one right trace, worked out from the prompt's words alone."""
    words = prompt.split()
    cut = words.index("plan")
    table = dict(zip(words[1:cut:2], words[2:cut:2], strict=True))
    *plan, last, answer, go = words[cut + 1 :]
    assert (answer, go) == ("answer", "go")
    out: list[str] = []
    total = 0
    for number, name in zip(plan[::2], plan[1::2], strict=True):
        value = int(table[name])
        out += ["step", number, name, str(value), "+", str(total), "->"]
        total = (total + value) % 10
        out.append(str(total))
        digit, ticks = total, 0
        while digit != value or ticks < 8:
            digit, ticks = (digit + 1) % 10, ticks + 1
            out.append(f".{digit}")
        assert 8 <= ticks <= 17
    return [*out, "step", last, "answer", str(total), "<eos>"]


@pytest.mark.parametrize("seed", [0, 1, 7, 12345, -1, -99])
def test_the_trace_is_the_one_that_follows_from_the_prompt(seed: int) -> None:
    problem = ledger.make_problem(seed)
    assert problem.trace.split() == simulate(problem.prompt)
    assert problem.answer == problem.trace.split()[-2]


def test_a_seed_gives_one_problem_and_another_seed_another() -> None:
    assert ledger.make_problem(5) == ledger.make_problem(5)
    assert ledger.make_problem(5) != ledger.make_problem(6)
    assert ledger.make_problem(5) != ledger.make_problem(-5)


def test_a_seed_never_changes_its_problem() -> None:
    problem = ledger.make_problem(0, steps=2, names=4)
    assert problem.prompt == "ledger sue 3 eli 2 pam 8 una 0 plan #1 sue #2 pam #3 answer go"


def test_default_lengths_spread_over_150_to_800_tokens() -> None:
    lengths = [ledger.make_problem(seed).length for seed in range(300)]
    assert min(lengths) >= 150 and max(lengths) <= 800
    assert min(lengths) < 190 and max(lengths) > 760
    assert all(4 <= len(ledger.make_problem(seed).bindings) <= 12 for seed in range(50))


@pytest.mark.parametrize("length", [150, 412, 800])
def test_a_given_length_is_met_within_half_a_step(length: int) -> None:
    assert all(abs(ledger.make_problem(s, length=length).length - length) <= 14 for s in range(50))


def test_steps_names_and_first_number_are_obeyed() -> None:
    problem = ledger.make_problem(3, steps=5, names=6, first=11)
    assert (problem.steps, len(problem.bindings)) == (5, 6)
    assert "plan #11 " in problem.prompt and "step #15 " in problem.trace


@pytest.mark.parametrize(
    "wish",
    [
        {"steps": 0},
        {"steps": 49},
        {"names": 3},
        {"names": 13},
        {"length": 5},
        {"length": 9000},
        {"steps": 4, "length": 200},
        {"first": 0},
        {"first": 48, "steps": 2},
    ],
)
def test_impossible_wishes_are_refused_in_one_line(wish: dict[str, int]) -> None:
    with pytest.raises(UserError) as caught:
        ledger.make_problem(0, **wish)
    assert "\n" not in str(caught.value)


def test_training_seeds_are_negative_and_distinct() -> None:
    seeds = [ledger.training_seed(r, b, i) for r in (0, 1, 9) for b in range(40) for i in range(40)]
    assert max(seeds) < 0 and len(set(seeds)) == len(seeds)
    with pytest.raises(ValueError, match="run -1"):
        ledger.training_seed(-1, 0, 0)


def test_the_right_trace_gets_every_point() -> None:
    problem = ledger.make_problem(2, steps=5)
    assert ledger.grade(problem, problem.trace.split()) == ledger.LedgerGrade(True, 10, 10)


def test_one_wrong_name_with_its_own_value_costs_one_look_up() -> None:
    problem = ledger.make_problem(2, steps=5)
    words = problem.trace.split()
    at = words.index("#3")
    name, value = next(pair for pair in problem.bindings if pair[0] != words[at + 1])
    words[at + 1 : at + 3] = [name, str(value)]
    assert ledger.grade(problem, words) == ledger.LedgerGrade(True, 9, 10)


def test_a_wrong_value_costs_one_look_up_and_a_wrong_answer_the_exactness() -> None:
    problem = ledger.make_problem(2, steps=5)
    words = problem.trace.split()
    words[words.index("#3") + 2] = str((int(words[words.index("#3") + 2]) + 1) % 10)
    words[-2] = str((int(words[-2]) + 1) % 10)
    assert ledger.grade(problem, words) == ledger.LedgerGrade(False, 9, 10)


def test_truncated_traces_lose_the_missing_steps_and_the_answer() -> None:
    problem = ledger.make_problem(2, steps=5)
    words = problem.trace.split()
    assert ledger.grade(problem, words[:-2]) == ledger.LedgerGrade(False, 10, 10)
    assert ledger.grade(problem, words[: words.index("#4")]) == ledger.LedgerGrade(False, 6, 10)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step",
        "step #1",
        "answer",
        "step step step step",
        "#1 #2 -> <pad>",
        "nonsense " * 50,
        "step #1 nobody 3",
        "step #99 ann 3",
        "answer answer answer",
    ],
)
def test_malformed_output_gets_no_points_and_no_exception(text: str) -> None:
    problem = ledger.make_problem(2, steps=5)
    assert ledger.grade(problem, text.split()) == ledger.LedgerGrade(False, 0, 10)


def test_a_repeated_step_counts_once_and_what_follows_the_answer_not_at_all() -> None:
    problem = ledger.make_problem(2, steps=2)
    words = problem.trace.split()
    first = words[: words.index("#2") - 1]
    assert ledger.grade(problem, first + words).lookups_right == 4
    assert ledger.grade(problem, [*first, "answer", problem.answer, *words]).lookups_right == 2


def test_every_word_is_one_token_and_comes_back() -> None:
    tokenizer = ledger.build_tokenizer()
    problem = ledger.make_problem(4)
    text = f"{problem.prompt} {problem.trace}"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == problem.length
    assert tokenizer.decode(tokens) == text
    assert tokenizer.pad_token_id not in tokens
    assert (tokenizer.padding_side, tokenizer.eos_token) == ("left", "<eos>")
