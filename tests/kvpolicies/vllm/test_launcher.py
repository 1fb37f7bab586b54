"""`kvpolicies vllm` where vLLM is not installed: what it would run, and what it refuses."""

import importlib.util
import json
import shlex
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicies.cli import main
from kvpolicies.errors import UserError
from kvpolicies.registry import resolve
from kvpolicies.vllm.arguments import command_line
from kvpolicies.vllm.refusals import check_model, check_policy, check_vllm
from kvpolicies.vllm.terms import VARIABLE, Terms
from tests.support.models import tiny


def printed(capsys: pytest.CaptureFixture, *options: str) -> list[str]:
    assert main(["vllm", "--print", *options]) == 0
    return shlex.split(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture, *options: str) -> str:
    assert main(["vllm", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_deployment_becomes_vllms_arguments(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text("policy: h2o\nbudget: 256\nsinks: 8\nbatch_size: 16\nthinking: false\n")
    more = ["--vllm", "--gpu-memory-utilization", "0.8"]
    words = printed(capsys, str(deploy), "--port", "9000", *more)
    option = dict(pairwise(words))
    assert "vllm.entrypoints.openai.api_server" in words
    assert option["--attention-backend"] == "CUSTOM"
    assert (option["--max-num-seqs"], option["--max-model-len"]) == ("16", "2048")
    assert option["--num-gpu-blocks-override"] == "17"
    assert option["--served-model-name"] == "embedded"
    assert (Path(option["--model"]) / "config.json").is_file()
    assert "--no-enable-prefix-caching" in words
    assert words[-2:] == ["--gpu-memory-utilization", "0.8"]
    terms = Terms.of(json.loads(option["--additional-config"]))
    assert terms == Terms("h2o", "256", 8, None, 2048)
    variables = dict(w.split("=", 1) for w in words[1:3])
    assert Terms(**json.loads(variables[VARIABLE])) == terms
    sampling = json.loads(option["--override-generation-config"])
    assert sampling == {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 512}
    assert json.loads(option["--default-chat-template-kwargs"])["enable_thinking"] is False


def test_options_of_every_kind() -> None:
    given = {"max_num_seqs": 8, "enforce_eager": True, "enable_x": False, "many": ["a", "b"]}
    assert command_line({**given, "config": {"a": 1}}) == [
        *("--max-num-seqs", "8", "--enforce-eager", "--no-enable-x", "--many", "a", "b"),
        *("--config", '{"a": 1}'),
    ]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_one_line_says_what_to_install(capsys: pytest.CaptureFixture) -> None:
    error = refused(capsys, "--policy", "h2o")
    assert "vllm is not installed: pip install 'kvpolicies[vllm]'" in error


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--policy", "oracle"], "looks ahead"),
        (["--policy", "criticalkv"], "output projection"),
        (["--policy", "h2o(faithful=True)"], "a paper's own rule"),
        (["--policy", "kvpop", "--model", "other/model"], "made for model embedded"),
        (["--budget", "25%"], "pages are of one size"),
        (["--sinks", "prompt"], "could not be refused"),
        (["--budget", "256:pyramid"], "layers"),
        (["--budget", "8", "--window", "8"], "leaves no slot"),
        (["--wrapper", "Q: {prompt}"], "wrapper"),
        (["--model", "x.gguf"], "no such file"),
        (["--policy", "tova", "--tensor-parallel-size", "2"], "KV heads together"),
        (["--policy", "h2o", "--tensor-parallel-size", "4"], "2 KV heads"),
        (["--vllm", "--enable-prefix-caching"], "prefix caching"),
        (["--vllm", "--speculative_config={}"], "speculative decoding"),
        (["--vllm", "-tp", "2"], "before --vllm"),
        (["--vllm", "--kv-cache-dtype", "fp8"], "the model's own dtype"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    capsys: pytest.CaptureFixture, options: list[str], why: str
) -> None:
    assert why in refused(capsys, "--print", *options)


def config(**changes: Any) -> SimpleNamespace:
    """As much of a VllmConfig as is looked at."""
    flat: dict[str, Any] = dict(
        enable_prefix_caching=False, cache_dtype="auto", speculative_config=None,
        kv_transfer_config=None, use_mla=False, dtype="torch.bfloat16", use_v2_model_runner=False,
        pipeline_parallel_size=1, decode_context_parallel_size=1, enable_dbo=False,
    )  # fmt: skip
    part = SimpleNamespace(**{**flat, **changes})
    part.cache_config = part.parallel_config = part.model_config = part
    return part


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"enable_prefix_caching": True}, "prefix caching"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"use_mla": True}, "MLA"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"use_v2_model_runner": True}, "V2 model runner"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"enable_dbo": True}, "dual-batch overlap"),
    ],
)
def test_a_vllm_that_would_break_the_budget_is_refused(change: dict[str, Any], why: str) -> None:
    check_vllm(config(cache_dtype="bfloat16"))
    with pytest.raises(UserError, match=why):
        check_vllm(config(**change))


def test_policies_that_need_what_vllm_does_not_show() -> None:
    with pytest.raises(UserError, match="enforce-eager"):
        check_policy(resolve("dms"), eager=False)
    check_policy(resolve("dms"), eager=True)
    sliding = tiny().__class__(_sliding(tiny().config))
    with pytest.raises(UserError, match="sliding window"):
        check_model(sliding, resolve("h2o"))


def _sliding(found: Any) -> Any:
    kinds = ["full_attention", "sliding_attention"]
    return type(found)(**{**found.to_dict(), "layer_types": kinds, "sliding_window": 8,
                          "use_sliding_window": True})  # fmt: skip


def test_a_request_may_ask_for_less_and_for_no_more() -> None:
    terms = Terms("h2o", "256", None, None, 2048)
    assert terms.schedule(64).capacity == 64 and terms.slots == 256
    assert Terms("h2o", "256:even", None, None, 2048).schedule(64).capacity == 64
    for wrong in (257, 0, True, "64"):
        with pytest.raises(UserError, match="at most 256 here"):
            terms.schedule(wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="evicts nothing"):
        Terms("full", "256", None, None, 2048).schedule(64)
    assert Terms("full", "256", None, None, 2048).slots == 2048


def test_without_terms_vllm_was_started_by_someone_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="start it by kvpolicies vllm"):
        Terms.of({})
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Terms.of_environment() is None
    monkeypatch.setenv(VARIABLE, Terms("h2o", "64", 4, 8, 100).text)
    assert Terms.of_environment() == Terms("h2o", "64", 4, 8, 100)


def test_every_policy_runs_or_is_refused_by_name() -> None:
    """A policy that is added to the table is tried inside vLLM, or says why not."""
    from kvpolicies.registry import POLICIES
    from tests.vllm.test_engine import POLICIES as TRIED

    refused = {"criticalkv", "oracle"}
    for name in refused:
        with pytest.raises(UserError):
            check_policy(resolve(name))
    assert {*POLICIES} == {*TRIED, *refused, "triattention"} - {"beacon(quota='ams')"}
