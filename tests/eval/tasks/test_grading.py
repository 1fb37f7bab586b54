"""Grading: what counts as the answer of a text, and which answers are equal."""

import pytest

from kvpolicies.eval.tasks import multiple_choice as choices
from kvpolicies.eval.tasks.graders import last_block
from kvpolicies.eval.tasks.grading import ends_in_loop, extract_answer, is_correct, last_box
from kvpolicies.eval.tasks.problems import Problem
from kvpolicies.eval.tasks.task import TASKS

RIGHT = [
    (r"so $\boxed{\frac{14}{3}}$", r"\frac{14}{3}"),  # stopping at the first } is a known fault
    (r"\boxed{\dfrac{14}{3}}", "14/3"),
    (r"\boxed{\frac{1}{\frac{2}{3}}}", r"\frac{3}{2}"),
    (r"\boxed{-\frac12}", "-0.5"),
    (r"\boxed{3} then \boxed{4}", "4"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}"),
    (r"\boxed{1,2}", "2,1"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\boxed{p - q}", "-q + p"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("reasoning\n#### 18\n", "18"),
    (r"\boxed{18}", "16 - 3 - 4 = 9, times 2.\n#### 18"),  # gsm8k's own answer field
    # nested braces
    (r"\boxed{\left\{ \frac{1}{\sqrt{2}} \right\}}", r"\{\frac{\sqrt{2}}{2}\}"),
    (r"\boxed{\frac{\sqrt{3}}{\frac{2}{1}}}", r"\frac{\sqrt{3}}{2}"),
    (r"\boxed{2^{10^{1}}}", "1024"),
    # fractions
    (r"\boxed{1\frac{1}{2}}", r"\frac32"),
    (r"\boxed{\tfrac{-3}{4}}", "-0.75"),
    # units, money, degrees
    (r"\boxed{5\,\mathrm{cm}^2}", "5"),
    (r"\boxed{10\pi \text{ cm}^2}", r"10\pi"),
    (r"\boxed{\$1,234.50}", "1234.5"),
    # sets, intervals, unions
    (r"\boxed{\{3,\,1,\,2\}}", "1, 2, 3"),
    (r"\boxed{x \in [0,1)}", "[0, 1)"),
    (r"\boxed{(-\infty, 3]}", r"(-\infty,3]"),
    (r"\boxed{(0,1)\cup(2,3)}", r"(2,3)\cup(0,1)"),
    # several boxes: the last counts; text after it does not
    (r"\boxed{1}, or rather \boxed{2}. Check: 3 + 4 = 7.", "2"),
    (r"\boxed{2} is the answer, since 5 > 4", "2"),
    (r"\fbox{2}", "2"),
    # percentages
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{12.5}", r"12.5\%"),
    # thousands
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{11,\! 111,\! 100}", "11111100"),
    (r"\boxed{10\,080}", "10080"),
    (r"\boxed{033}", "33"),  # AIME's three digits
    (r"\boxed{33}", "033"),
]
WRONG = [
    (r"\boxed{4} then \boxed{3}", "4"),
    (r"\boxed{\frac{14}{5}}", r"\frac{14}{3}"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{}", "3"),
    (r"\boxed{x^2 +}", "3"),
    ("the answer is 18", "18"),  # no box, and the last number does not count here
    ("", "3"),
    (r"\boxed{(0,1)}", "[0,1]"),
    (r"\boxed{(0,1]}", "[0,1)"),
    (r"\boxed{\{1,2\}}", r"\{1,2,3\}"),
    (r"\boxed{3} but then \boxed{}", "3"),  # the last one is empty
    (r"\boxed{ }", "3"),
    (r"\boxed{500\%}", "50"),
    (r"\boxed{12,34}", "1234"),
    (r"\boxed{3", "3"),
    (r"\boxed 3", "4"),
    (r"\boxed{2\text{ or }3}", "2"),
]


@pytest.mark.parametrize(("text", "answer"), RIGHT)
def test_right(text, answer):
    assert is_correct(text, answer)


@pytest.mark.parametrize(("text", "answer"), WRONG)
def test_wrong(text, answer):
    assert not is_correct(text, answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18 eggs, sold at 2. So she makes $18.", "18"),
        ("The total is $1,234.", "1234"),
        ("x = -3", "-3"),
        ("12 - 4", "4"),
        ("5-3", "3"),  # a minus right after a digit subtracts
        ("about .5", ".5"),
        ("2/3 is left", "2/3"),
        ("none", None),
        (r"\boxed{7} and then 9", "7"),
    ],
)
def test_last_number_where_a_task_allows_it(text, number):
    assert extract_answer(text, ("boxed", "hashes", "last_number")) == number


def test_a_box_that_was_cut_off_is_no_answer():
    assert last_box(r"\boxed{3} and \boxed{\frac{14}{") == "3"
    assert last_box(r"\boxed{\frac{14}{3}") is None
    assert last_box(r"\boxed{3 + \boxed{4}") == "4"


def test_each_text_is_graded_by_itself():
    """A grade depends on this text alone, whatever was graded before (a known fault elsewhere)."""
    texts = [r"\boxed{1}", "no answer", r"\boxed{2}"]
    alone = [is_correct(text, "1") for text in texts]
    assert alone == [True, False, False]
    assert [is_correct(text, "1") for text in reversed(texts)] == alone[::-1]


def test_a_bug_in_the_comparison_counts_as_wrong():
    """Nested past any stack, or longer than any number."""
    for text in ("(" * 400 + "3" + ")" * 400, "{" * 900, "9" * 900 + "^" + "9" * 90, "3" * 5000):
        assert not is_correct(rf"\boxed{{{text}}}", "4")


def test_loops():
    assert ends_in_loop([7, *[1, 2, 3] * 4])
    assert not ends_in_loop([1, 2, 3] * 3)
    assert not ends_in_loop(list(range(100)))
    assert not ends_in_loop([])


GPQA = TASKS["gpqa-diamond"]
CHOICE = Problem("q", "?", "C", choices=("w", "x", "y", "z"))


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{C}",
        r"\boxed{\text{C}}",
        r"\boxed{(C)}",
        r"\boxed{\textbf{(C) } 5}",
        r"\boxed{C: 5\,\mathrm{m}}",
        r"\boxed{\mathrm{C}}",
        r"\boxed{c}",
        r"\boxed{A} no, \boxed{C}",
        "Answer: C",
        "**Answer:** C",
        "The answer is: (C) 5 m/s",
        "Answer: A\nNo.\nAnswer: **C**.",
        "Answer: Option C",
        "(A) is wrong, so (C)",
        "C",
        r"\boxed{5} m/s. Answer: C",  # the box holds no letter: the next way
    ],
)
def test_letters(text):
    assert GPQA.grade(CHOICE, text) == {"correct": 1}


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{A}",
        r"\boxed{E}",  # there is no fifth
        "",
        "Answer: A\nbut (C) is close",  # the line of the answer goes before letters in brackets
        "Carbon",
        "Answer: Carbon",
        "Clearly I cannot say. Answer: A force of 5 N",
        r"\boxed{C} wait \boxed{D}",
        r"\boxed{C_2}",
    ],
)
def test_no_letter_or_a_wrong_one(text):
    assert GPQA.grade(CHOICE, text) == {"correct": 0}


def test_choices_are_shuffled_by_the_problem_alone():
    wrong = ["1", "2", "3"]
    orders = {n: choices.shuffled(f"problem {n}", "right", wrong) for n in range(40)}
    assert orders[7] == choices.shuffled("problem 7", "right", wrong)
    assert orders[7] == choices.shuffled("problem 7", "right", [*wrong, "right"])  # all, or others
    for shown, letter in orders.values():
        assert sorted(shown) == ["1", "2", "3", "right"] and shown["ABCD".index(letter)] == "right"
    # Each place is right now and then: 40 draws miss one of four with probability 4 * 0.75**40.
    assert {letter for _, letter in orders.values()} == set("ABCD")


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```\ntext\n```py\nx = 2\n```\nmore", "x = 2"),
        ("  ```python\n  x = 1\n  ```", "  x = 1"),
        ("````md\n```python\nx\n```\n````", "```python\nx\n```"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1"),  # cut off: no answer
        ("x = 1", None),
        ("```python\nx = 1", None),
    ],
)
def test_the_last_closed_block(text, block):
    assert last_block(text) == block
