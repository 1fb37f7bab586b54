"""The fastest windows of several runs, on made-up clocks."""

import torch

import kvpolicies
from kvpolicies import loop
from kvpolicies.eval.bench.timing import Mark, fastest, stopwatch, watched
from tests.support.models import prompts, tiny


def run(step_seconds: list[float], first: float = 1.0) -> list[Mark]:
    """Marks of no tokens, of the first one, and of one more after each step."""
    marks, now = [Mark(0, 0.0, 0.0), Mark(1, first, first)], first
    for tokens, seconds in enumerate(step_seconds, 2):
        now += seconds
        marks.append(Mark(tokens, now, now / 2))
    return marks


def test_each_window_is_its_fastest_run() -> None:
    slow_then_fast = [9.0, *[3.0] * 4, *[1.0] * 4, 5.0]
    fast_then_slow = [7.0, *[2.0] * 4, *[4.0] * 4, 6.0]
    speed = fastest([run(slow_then_fast), run(fast_then_slow, first=0.5)], window=4)
    assert (speed.first_token_s, speed.first_step_s) == (0.5, 9.0)
    assert speed.steps == 9
    assert speed.wall == 4 * 2.0 + 4 * 1.0 + 5.0
    assert speed.cpu == speed.wall / 2


def test_windows_follow_looks_of_several_tokens() -> None:
    marks = [Mark(n, float(n), 0.0) for n in (0, 1, 9, 17, 25, 33, 38)]
    speed = fastest([marks], window=16)
    assert speed.steps == 38 - 9 and speed.wall == 38 - 9


def test_the_loop_is_watched_and_left_as_it_was() -> None:
    before = loop.Loop._prefill, loop.Loop._decode
    marks, mark = stopwatch(torch.device("cpu"))
    mark(0)
    with watched(mark):
        kvpolicies.generate(
            tiny(), prompts(20, 40), "streaming", 24, max_new_tokens=6, eos_token_id=-1
        )
    assert [m.tokens for m in marks] == [0, 1, 2, 3, 4, 5, 6]
    assert before == (loop.Loop._prefill, loop.Loop._decode)
