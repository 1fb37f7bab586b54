"""vLLM in the tests' own process, one engine at a time, and what it must answer.

These tests skip where vLLM is not installed: `make test-vllm` makes an environment that has it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

# Read when vLLM is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
BUDGET, NEW, LENGTH = 101, 120, 1024


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed: make test-vllm")
        for item in items:
            if "tests/vllm/" in item.path.as_posix():
                item.add_marker(skip)


def vllm() -> Any:
    """The package; a folder of ours has its name."""
    return importlib.import_module("vllm")


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Twelve ledger problems, from 33 to 573 tokens: some with most of their trace."""
    from kvpolicies.eval.tasks import ledger
    from kvpolicies.models import embedded

    tokenizer = embedded.load()[1]
    found = []
    for seed in range(12):
        problem = ledger.make_problem(seed, length=200 + 50 * seed)
        words, trace = problem.prompt.split(), problem.trace.split()
        words += trace[: len(trace) * 3 // 4] if seed % 3 == 2 else []
        found.append(tokenizer(" ".join(words))["input_ids"])
    return found


@pytest.fixture(scope="session")
def expected(prompts: list[list[int]]) -> Callable[..., list[list[int]]]:
    """Tokens of `kvpolicies.generate`, by policy and budget."""
    from kvpolicies import generate
    from kvpolicies.models import embedded

    model = embedded.load()[0]
    known: dict[tuple[str, int], list[list[int]]] = {}

    def tokens(policy: str, budget: int = BUDGET) -> list[list[int]]:
        if (policy, budget) not in known:
            made = generate(model, prompts, policy, budget, max_new_tokens=NEW, batch_size=4)
            known[policy, budget] = [g.tokens for g in made]
        return known[policy, budget]

    return tokens


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    """Makes a `vllm.LLM` of four rows that runs a policy; all its memory goes with the test."""
    import gc

    from kvpolicies.config import Deployment
    from kvpolicies.vllm.arguments import check, engine_arguments, terms_of

    made: list[Any] = []

    def make(policy: str, **options: Any) -> Any:
        config = Deployment(policy=policy, budget=str(BUDGET), max_length=LENGTH, batch_size=4)
        chosen, found = check(config)
        given = engine_arguments(config, terms_of(config, found), chosen)
        given.update(enforce_eager=True, max_num_batched_tokens=4096)
        made.append(vllm().LLM(**{**given, **options}))
        return made[0]

    yield make
    made.clear()
    gc.collect()


def sampling(number: int, **asked: Any) -> Any:
    """Greedy, with the number that `generate` knows a request by."""
    return vllm().SamplingParams(
        temperature=0, max_tokens=NEW, extra_args={"kv_seed": number, **asked}
    )  # fmt: skip


def tokens(llm: Any, prompts: Sequence[list[int]], **asked: Any) -> list[list[int]]:
    """New tokens of each prompt."""
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in prompts],
        [sampling(i, **asked) for i in range(len(prompts))],
        use_tqdm=False,
    )
    return [list(o.outputs[0].token_ids) for o in outputs]


def interrupted(llm: Any, prompts: Sequence[list[int]], steps: Sequence[int]) -> list[list[int]]:
    """New tokens of each prompt, where all that runs is thrown out at some steps."""
    engine, found, n, thrown = llm.llm_engine, {}, 0, 0
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling(i))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                number = int(output.request_id.partition("-")[0])
                found[number] = list(output.outputs[0].token_ids)
        n += 1
        if n in steps:
            scheduler = engine.engine_core.engine_core.scheduler
            thrown += len(scheduler.running)
            scheduler.reset_prefix_cache(reset_running_requests=True)
            assert not scheduler.running
    assert n > max(steps) and thrown
    return [found[i] for i in range(len(prompts))]
