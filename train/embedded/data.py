"""Training batches of the embedded model: a function of (seed, step), so that a run can resume.

Notable: a batch holds plans of one size, so little is padded; in half of the rows the plan's
numbers start anywhere, so that #40 is trained as well as #4; a stage may replace traces by drills.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.eval.tasks import ledger

IGNORED = -100  # cross entropy's label for "no loss here"


@dataclass(frozen=True)
class Stage:
    """Before training step ``until``: plans of ``low`` to ``high`` steps, about so many tokens.

    ``drills`` > 0 replaces each trace by so many bare look-ups in random order.
    """

    until: int
    low: int
    high: int
    batch_tokens: int
    drills: int = 0


def training_batch(
    stages: Sequence[Stage], seed: int, step: int, ids: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, T] of one step, a function of (seed, step); padded on the right."""
    rng = random.Random(f"batch {seed} {step}")
    stage = next(s for s in stages if step < s.until)
    size = rng.randint(stage.low, stage.high)
    row_tokens = 2 * size + 19 + 2 * stage.drills if stage.drills else 22.5 * size + 24
    lines = []
    for row in range(max(1, round(stage.batch_tokens / row_tokens))):
        first = rng.randint(1, ledger.MAX_STEPS - size + 1) if rng.random() < 0.5 else 1
        problem_seed = ledger.training_seed(seed, step, row)
        problem = ledger.make_problem(problem_seed, steps=size, first=first)
        lines.append(
            drill_line(problem, stage.drills, rng) if stage.drills else trace_line(problem)
        )
    return collate(lines, ids)


def trace_line(problem: ledger.LedgerProblem) -> tuple[list[str], list[bool]]:
    """The words of a problem, and which carry loss: those of the trace."""
    prompt, trace = problem.prompt.split(), problem.trace.split()
    return prompt + trace, [False] * len(prompt) + [True] * len(trace)


def drill_line(
    problem: ledger.LedgerProblem, count: int, rng: random.Random
) -> tuple[list[str], list[bool]]:
    """The prompt, then ``count`` look-ups: a number and its name, or a name and its value.

    Traces alone leave a small model for long where it knows *which* digits are bound but not to
    whom; ten times as many look-ups a token end that at once. Only what is looked up carries loss.
    """
    pairs = [(f"#{number}", name) for number, name in enumerate(problem.plan, problem.first)]
    pairs.append((f"#{problem.first + problem.steps}", "answer"))
    bound = [(name, str(value)) for name, value in problem.bindings]
    words = problem.prompt.split()
    loss = [False] * len(words)
    for _ in range(count):
        words += rng.choice(bound if rng.random() < 0.6 else pairs)
        loss += [False, True]
    return words, loss


def collate(
    lines: Sequence[tuple[Sequence[str], Sequence[bool]]], ids: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, T]; padding and words without loss carry no label."""
    width = max(len(words) for words, _ in lines)
    tokens = torch.full((len(lines), width), ids[ledger.PAD])
    labels = torch.full_like(tokens, IGNORED)
    for row, (words, loss) in enumerate(lines):
        line = torch.tensor([ids[word] for word in words])
        tokens[row, : len(line)] = line
        labels[row, : len(line)] = line.masked_fill(~torch.tensor(loss), IGNORED)
    return tokens, labels
