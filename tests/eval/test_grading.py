"""Grading: what counts as the answer of a text, and which answers are equal."""

import threading

import pytest

from kvpolicies.eval.grading import ends_in_loop, extract_answer, is_correct, last_box

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
]
WRONG = [
    (r"\boxed{4} then \boxed{3}", "4"),
    (r"\boxed{\frac{14}{5}}", r"\frac{14}{3}"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{}", "3"),
    (r"\boxed{x^2 +}", "3"),
    ("the answer is 18", "18"),  # no box, and the last number does not count here
    ("", "3"),
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
    assert extract_answer(text, last_number=True) == number


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


def test_outside_the_main_thread():
    """math-verify's timeouts are alarms, which other threads cannot set."""
    found = []
    thread = threading.Thread(target=lambda: found.append(is_correct(r"\boxed{1/2}", "0.5")))
    thread.start()
    thread.join()
    assert found == [True]


def test_a_parser_that_raises_counts_as_wrong(monkeypatch):
    import math_verify

    def broken(*_, **__):
        raise RecursionError

    monkeypatch.setattr(math_verify, "parse", broken)
    assert not is_correct(r"\boxed{3}", "4")


def test_loops():
    assert ends_in_loop([7, *[1, 2, 3] * 4])
    assert not ends_in_loop([1, 2, 3] * 3)
    assert not ends_in_loop(list(range(100)))
    assert not ends_in_loop([])
