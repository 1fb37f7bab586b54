"""Ledger traces: a synthetic reasoning task whose every token after the prompt is determined.

A prompt binds names to digits in random order and numbers a plan of names, the answer last:

    ledger bob 7 ann 3 plan #1 ann #2 bob #3 answer go

The trace goes through the plan. A step gives its number, the planned name, the bound value and the
running total modulo 10; then come *ticks*, counting up (modulo 10) from the new total until the
digit equals the value and at least ``FILL`` ticks were made (so 8 to 17 of them):

    step #1 ann 3 + 0 -> 3 .4 .5 .6 .7 .8 .9 .0 .1 .2 .3 step #2 bob 7 + 3 -> 0 .1 ...
    ... .6 .7 step #3 answer 0 <eos>

Each step looks far back twice (plan item, binding) and otherwise only near, so an eviction policy
fails exactly where it dropped a token that is still needed. Greedy decoding has one right trace.
A guessed answer is right one time in ten. Tokens are words: one token a word.

Seeds: problems for studies and tests use seeds >= 0; training uses negative seeds only
(:func:`training_seed`), so that the two never meet. The whole seed, sign included, seeds the draw.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpolicies.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILL = 8  # the least number of ticks after each step
MAX_STEPS = 48  # steps a plan may have; the answer's number may be #49
MIN_NAMES, MAX_NAMES = 4, 12
MIN_LENGTH, MAX_LENGTH = 150, 800  # tokens of prompt + trace by default
PAD, EOS = "<pad>", "<eos>"
_NAMES = "ann bob cid dot eli fay gus hal ivy jon kim lou mia ned ola pam qui ray sue tom una vic"
NAMES = (*_NAMES.split(), "wes", "zoe")
_ROWS_PER_BATCH = 1 << 12
_BATCHES_PER_RUN = 1 << 28


@dataclass(frozen=True)
class LedgerProblem:
    """One problem; ``prompt`` and ``trace`` are words joined by single spaces, one token a word.

    ``bindings`` are (name, digit) pairs in prompt order and ``plan`` the planned names, whose
    numbers start at ``first`` (1 unless training varies it). ``answer`` is the last digit.
    """

    prompt: str
    trace: str
    answer: str
    bindings: tuple[tuple[str, int], ...]
    plan: tuple[str, ...]
    first: int = 1

    @property
    def steps(self) -> int:
        """Planned steps."""
        return len(self.plan)

    @property
    def length(self) -> int:
        """Tokens of prompt and trace together."""
        return len(self.prompt.split()) + len(self.trace.split())


@dataclass(frozen=True)
class LedgerGrade:
    """``exact``: an answer was given and is right. ``lookups`` is two per planned step."""

    exact: bool
    lookups_right: int
    lookups: int


def training_seed(run: int, batch: int, row: int) -> int:
    """The problem seed of one training row: always negative, distinct for distinct arguments."""
    if not (run >= 0 and 0 <= batch < _BATCHES_PER_RUN and 0 <= row < _ROWS_PER_BATCH):
        raise ValueError(f"no training seed for run {run}, batch {batch}, row {row}")
    return -1 - ((run * _BATCHES_PER_RUN + batch) * _ROWS_PER_BATCH + row)


def make_problem(
    seed: int,
    *,
    steps: int | None = None,
    names: int | None = None,
    length: int | None = None,
    first: int = 1,
) -> LedgerProblem:
    """The problem of a seed: the same on every machine.

    ``steps`` fixes the plan's size; ``length`` asks for the plan whose prompt + trace come nearest
    to so many tokens (within 14 of it). With neither, the length is drawn uniformly from 150 to
    800 tokens and never leaves that range. ``names`` (4 to 12) is drawn unless given.
    """
    _check(steps, names, length, first)
    # A string seed hashes sign and all; random.Random(-5) would equal random.Random(5).
    rng = random.Random(f"ledger {seed}")
    count = rng.randint(MIN_NAMES, MAX_NAMES) if names is None else names
    bindings = tuple((name, rng.randrange(10)) for name in rng.sample(NAMES, count))
    target = rng.uniform(MIN_LENGTH, MAX_LENGTH)
    limit = MAX_STEPS - first + 1
    plan = tuple(rng.choice(bindings)[0] for _ in range(limit))
    if steps is None:
        low, high = (MIN_LENGTH, MAX_LENGTH) if length is None else (0, 1 << 30)
        steps = _steps_for(dict(bindings), plan, length or target, low, high)
    return _write(bindings, plan[:steps], first)


def grade(problem: LedgerProblem, text_tokens: Sequence[str]) -> LedgerGrade:
    """Grade the words a model wrote after the prompt; any sequence of words is accepted.

    Steps are found by the number they carry: ``step #i name value``, the first of each number
    counts. A plan look-up is right if the name is the plan's; a binding look-up is right if the
    value is the one bound to the name *written*, so one slip is not counted twice. Missing steps
    are wrong twice. What follows the first ``answer`` is not read, but for the answer itself.
    """
    words = list(text_tokens)
    end = words.index("answer") if "answer" in words else len(words)
    written: dict[str, tuple[str, str]] = {}
    for at in range(min(end, len(words) - 3)):
        if words[at] == "step":
            written.setdefault(words[at + 1], (words[at + 2], words[at + 3]))
    values = {name: str(value) for name, value in problem.bindings}
    right = 0
    for number, planned in enumerate(problem.plan, problem.first):
        name, value = written.get(f"#{number}", ("", ""))
        right += (name == planned) + (name in values and values[name] == value)
    exact = words[end + 1 : end + 2] == [problem.answer]
    return LedgerGrade(exact, right, 2 * problem.steps)


def vocabulary() -> list[str]:
    """Every word of the task, in token-id order."""
    words = [PAD, EOS, "ledger", "plan", "go", "step", "+", "->", "answer"]
    words += [str(digit) for digit in range(10)] + [f".{digit}" for digit in range(10)]
    return words + list(NAMES) + [f"#{number}" for number in range(1, MAX_STEPS + 2)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over :func:`vocabulary`, padding on the left."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    ids = {word: token for token, word in enumerate(vocabulary())}
    inner = Tokenizer(WordLevel(ids, unk_token=PAD))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=2048,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def tick_count(new: int, value: int) -> int:
    """Ticks after a step: the least k >= FILL with (new + k) mod 10 = value."""
    return FILL + (value - new - FILL) % 10


def _check(steps: int | None, names: int | None, length: int | None, first: int) -> None:
    if steps is not None and length is not None:
        raise UserError("ledger: give steps or length, not both")
    if names is not None and not MIN_NAMES <= names <= MAX_NAMES:
        raise UserError(f"ledger: names is {names}; it must be {MIN_NAMES} to {MAX_NAMES}")
    if not 1 <= first <= MAX_STEPS:
        raise UserError(f"ledger: first is {first}; it must be 1 to {MAX_STEPS}")
    if steps is not None and not 1 <= steps <= MAX_STEPS - first + 1:
        raise UserError(f"ledger: steps is {steps}; it must be 1 to {MAX_STEPS - first + 1}")
    if length is not None and not 50 <= length <= MAX_LENGTH + 100:
        raise UserError(f"ledger: length is {length}; it must be 50 to {MAX_LENGTH + 100} tokens")


def _steps_for(
    values: dict[str, int], plan: Sequence[str], target: float, low: int, high: int
) -> int:
    """The number of steps whose total length is nearest to ``target`` within [low, high]."""
    # Besides the steps: ledger, bindings, plan, #i, answer, go; step, #i, answer, digit, <eos>.
    size, total = 2 * len(values) + 10, 0
    best, best_gap = 1, float("inf")
    for count, name in enumerate(plan, 1):
        total = (total + values[name]) % 10
        size += 2 + 8 + tick_count(total, values[name])
        if low <= size <= high and abs(size - target) < best_gap:
            best, best_gap = count, abs(size - target)
    return best


def _write(
    bindings: tuple[tuple[str, int], ...], plan: tuple[str, ...], first: int
) -> LedgerProblem:
    values = dict(bindings)
    prompt = ["ledger", *(str(item) for pair in bindings for item in pair), "plan"]
    trace: list[str] = []
    total = 0
    for number, name in enumerate(plan, first):
        prompt += [f"#{number}", name]
        value, old = values[name], total
        total = (old + value) % 10
        trace += ["step", f"#{number}", name, str(value), "+", str(old), "->", str(total)]
        trace += [f".{(total + k) % 10}" for k in range(1, tick_count(total, value) + 1)]
    last = f"#{first + len(plan)}"
    prompt += [last, "answer", "go"]
    trace += ["step", last, "answer", str(total), EOS]
    return LedgerProblem(" ".join(prompt), " ".join(trace), str(total), bindings, plan, first)
