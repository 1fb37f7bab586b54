"""What the targets of a scorer would do as a policy themselves: the ceiling of what it can learn.

    OMP_NUM_THREADS=1 python scripts/target_ceiling.py --problems 16

On ledger problems each token's priority is its own target, taken from a dense pass over the right
trace; eviction times follow, and one masked forward tells which tokens the model would still have
predicted. One line a target and budget: traces without any wrong token, and look-ups right.
"""

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicies.budget import Budget
from kvpolicies.eval.tasks import ledger
from kvpolicies.learned.boundary import retained
from kvpolicies.learned.targets import Target
from kvpolicies.models import embedded
from kvpolicies.replaying import replay
from kvpolicies.trace import EvictionTrace
from kvpolicies.train.objective import sizes
from kvpolicies.train.teacher import LabelledFeatures, Teacher

DELAY, LENGTH = 16, 412
TARGETS = {
    "mean attention (the paper's)": Target(DELAY),
    "sum": Target(DELAY, per_query=False),
    "mean, power 2": Target(DELAY, power=2.0),
    "sum, power 2": Target(DELAY, power=2.0, per_query=False),
    "sum, power 4": Target(DELAY, power=4.0, per_query=False),
}


class Trace(NamedTuple):
    """A problem with its right trace."""

    tokens: Tensor
    """[1, T]."""
    prompt: int
    """Tokens of the prompt."""
    lookups: list[int]
    """Places of looked-up words in the trace."""


def traces(count: int, tokenizer: object) -> list[Trace]:
    """The first problems of the default study."""
    made = []
    for seed in range(count):
        problem = ledger.make_problem(seed, length=LENGTH)
        words = problem.trace.split()
        steps = [i for i, word in enumerate(words) if word == "step"][: problem.steps]
        ids = tokenizer(f"{problem.prompt} {problem.trace}")["input_ids"]  # type: ignore[operator]
        at = [i + k for i in steps for k in (2, 3)]
        made.append(Trace(torch.tensor([ids]), len(problem.prompt.split()), at))
    return made


def right(model: object, trace: Trace, target: Target, budget: Budget) -> Tensor:
    """[T - prompt] bool: which tokens of the trace the model predicts under the evictions."""
    times: list[Tensor] = []

    def learn(lesson: LabelledFeatures) -> None:
        times.append(retained(lesson.targets, *sizes(budget))[1][0])

    teacher = Teacher(model, target, needs_input=False, unrotated=False)
    teacher.teach(trace.tokens, torch.zeros_like(trace.tokens), learn)
    evictions = EvictionTrace(torch.stack(times)[None].to(torch.int32), trace.tokens)
    predicted = replay(model, evictions)[0, trace.prompt - 1 : -1].argmax(dim=-1)
    return predicted == trace.tokens[0, trace.prompt :]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--budgets", type=int, nargs="+", default=[69, 101, 133])
    args = parser.parse_args()
    model, tokenizer = embedded.load()
    all_traces = traces(args.problems, tokenizer)
    print("| target | slots | whole traces % | look-ups right % |\n|---|---|---|---|")
    for name, target in TARGETS.items():
        for total in args.budgets:
            budget = Budget.parse(str(total))
            done = [(t, right(model, t, target, budget)) for t in all_traces]
            whole = sum(bool(r.all()) for _, r in done) / len(done)
            looked = torch.cat([r[t.lookups] for t, r in done]).float().mean().item()
            print(f"| {name} | {total} | {100 * whole:.0f} | {100 * looked:.1f} |", flush=True)


if __name__ == "__main__":
    main()
