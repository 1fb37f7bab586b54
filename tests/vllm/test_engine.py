"""vLLM's tokens are those of `kvpolicies.generate`, in float32 on the CPU, however it schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.conftest import BUDGET, interrupted, tokens

POLICIES = """full random streaming tova h2o snapkv rpc rkv keydiff lazy expected raas gkv vase
dropkv longflow beacon beacon(quota='ams') kvpop kvpop_mlp dms trimkv kvzap fastkvzip""".split()
Tokens = Callable[..., list[list[int]]]


@pytest.mark.parametrize("policy", POLICIES)
def test_whole_prompts_thrown_out_twice(
    policy: str, prompts: list[list[int]], expected: Tokens, engine: Callable[..., Any]
) -> None:
    """12 requests at 4 rows: each page has seen some; all that runs is thrown out twice."""
    llm = engine(policy)
    assert interrupted(llm, prompts, steps=(30, 100)) == expected(policy)
    check_pages(llm, policy)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "beacon", "rkv", "kvpop", "trimkv"])
def test_chunked_prompts_on_few_pages(
    policy: str, prompts: list[list[int]], expected: Tokens, engine: Callable[..., Any]
) -> None:
    """64 tokens a step, and three pages for twelve requests: one is vLLM's own, two are ours."""
    llm = engine(policy, max_num_batched_tokens=64, num_gpu_blocks_override=3)
    assert interrupted(llm, prompts, steps=(20,)) == expected(policy)
    check_pages(llm, policy)


def check_pages(llm: Any, policy: str) -> None:
    """All pages are given back, and none held more than the budget."""
    from kvpolicies.vllm.session import current

    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    planner = current().planner
    assert planner is not None
    most = max(planner.rows.peak)
    assert most > BUDGET if policy == "full" else most == BUDGET


def test_a_request_has_a_budget_of_its_own(
    prompts: list[list[int]], expected: Tokens, engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from kvpolicies.vllm.session import current
    from kvpolicies.vllm.terms import VARIABLE

    llm = engine("h2o")
    monkeypatch.setenv(VARIABLE, current().terms.text)
    assert tokens(llm, prompts, kv_budget=60) == expected("h2o", 60) != expected("h2o")
    with pytest.raises(Exception, match="at most 101 here, got 102"):
        tokens(llm, prompts[:1], kv_budget=102)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(Exception, match="not started by kvpolicies vllm"):
        tokens(llm, prompts[:1], kv_budget=60)
    assert tokens(llm, prompts) == expected("h2o")  # and the engine lives on


def test_memory_is_what_the_pages_take(engine: Callable[..., Any]) -> None:
    """vLLM accounts for a page as kvpolicies does for a row, but for its rounding to 64 bytes."""
    import torch

    from kvpolicies.cache import FixedBudgetCache
    from kvpolicies.models import embedded

    llm = engine("h2o")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    spec = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    cache = FixedBudgetCache(embedded.load()[0], "h2o", BUDGET)
    cache.allocate(1, torch.float32, torch.device("meta"))
    ours = cache.cache_bytes() + cache.state_bytes()
    assert 0 <= 4 * spec.page_size_bytes - ours < 4 * 64 * 5


def test_a_vllm_that_would_share_prefixes_is_refused(engine: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="prefix caching"):
        engine("h2o", enable_prefix_caching=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_two_processes_that_share_the_heads(
    policy: str, prompts: list[list[int]], expected: Tokens, engine: Callable[..., Any]
) -> None:
    """Tensor parallel: each holds one of the two KV heads, and evicts it by itself."""
    llm = engine(policy, tensor_parallel_size=2, distributed_executor_backend="mp")
    assert tokens(llm, prompts[:4]) == expected(policy)[:4]
