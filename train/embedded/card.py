"""How the embedded model is graded, and its model card.

``kvpolicies.train.embedded.run`` writes it; it lies beside the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpolicies.eval.tasks import ledger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

CARD = """\
---
license: apache-2.0
library_name: transformers
---
# ledger: the embedded model of kvpolicies

A Qwen3 decoder of 0.6 M parameters (4 layers, width 128, 4 query and 2 KV heads of 32, tied
embeddings, RoPE base 100,000, float32) that solves one synthetic task, ledger traces, described in
`kvpolicies/eval/ledger.py`. It exists to compare KV-cache eviction policies on a laptop. It knows
no language and is of no other use. It was trained on plans of up to 38 steps, about 890 tokens;
longer ones are outside its range.

## Recreate

    python -m kvpolicies.train.embedded.run --out DIR --seed {seed} --steps {steps}

Trained on one CPU thread, torch {torch}. Training problems have negative seeds, held-out ones
seeds from 0 on. On the same machine and versions a seed gives the same weights; elsewhere
rounding differs, and so do the last digits of the figures.

## Measured

Full cache, greedy decoding by transformers' `generate`, left-padded batches, float32, held-out
seeds from 0 on. A guessed answer is right one time in ten. Look-ups: two a step (plan item to
name, name to value).

| tokens (prompt + trace) | exact answers | look-ups right |
|---|---|---|
{table}
"""


@dataclass(frozen=True)
class Solved:
    """One problem and the grade of the model's greedy full-cache output."""

    problem: ledger.LedgerProblem
    grade: ledger.LedgerGrade


def solve(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[ledger.LedgerProblem],
    batch_size: int = 16,
    on_done: Callable[[int], object] | None = None,
) -> list[Solved]:
    """Greedy decoding by transformers' own ``generate``, left padded; results in problem order.

    Problems of like length share a batch; ``on_done`` hears the size of each finished batch.
    """
    order = sorted(range(len(problems)), key=lambda at: problems[at].length)
    solved: dict[int, Solved] = {}
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        outputs = _decode(model, tokenizer, [problems[at] for at in rows])
        for at, words in zip(rows, outputs, strict=True):
            solved[at] = Solved(problems[at], ledger.grade(problems[at], words))
        if on_done is not None:
            on_done(len(rows))
    return [solved[at] for at in range(len(problems))]


def _decode(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[ledger.LedgerProblem],
) -> list[list[str]]:
    """The words written after each prompt; the room is the longest right trace and a step more."""
    inputs = tokenizer(
        [problem.prompt for problem in problems],
        return_tensors="pt",
        padding=True,
        return_token_type_ids=False,
    )
    room = max(len(problem.trace.split()) for problem in problems) + 25
    with torch.inference_mode():
        output = model.generate(  # pyright: ignore[reportAttributeAccessIssue]  # its own mixin
            **inputs, max_new_tokens=room, do_sample=False
        )
    width = inputs["input_ids"].shape[1]
    return [str(tokenizer.decode(row)).split() for row in output[:, width:]]


def model_card(seed: int, steps: int, solved: Sequence[Solved]) -> str:
    """The README beside weights of ``seed`` after ``steps``; ``solved`` gives its figures."""
    lines = []
    for low, high in ((150, 300), (300, 450), (450, 600), (600, 801), (150, 801)):
        rows = [s for s in solved if low <= s.problem.length < high]
        exact = sum(s.grade.exact for s in rows)
        right = sum(s.grade.lookups_right for s in rows)
        lookups = sum(s.grade.lookups for s in rows)
        lines.append(f"| {low}-{high - 1} | {exact} of {len(rows)} | {right} of {lookups} |")
    version = torch.__version__.split("+")[0]
    return CARD.format(seed=seed, steps=steps, table="\n".join(lines), torch=version)
