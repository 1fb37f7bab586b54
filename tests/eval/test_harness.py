"""lm-eval's model `kvpolicies`: under `full` it is the plain model, under a policy generate's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicies
from kvpolicies.errors import UserError
from kvpolicies.eval.tasks import ledger

pytest.importorskip("lm_eval", reason="not installed: pip install kvpolicies[lm-eval]")

from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from kvpolicies.eval import harness
from kvpolicies.models.form import Form
from kvpolicies.models.prompts import Prompts, user
from tests.support.vocabularies import THINKS, of_bytes

PROBLEMS = [ledger.make_problem(number, length=80) for number in range(3)]
TEXTS = {
    "generate": """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: [";"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choose": """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: label
target_delimiter: " "
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


# lm_eval's decorator hides the class's own signature from a type checker.
adapter: Any = harness.PolicyLM


@pytest.fixture(scope="module")
def full() -> Any:
    """The embedded model, evicting nothing."""
    return adapter(model="embedded", policy="full", device="cpu", batch_size=2)


@pytest.fixture(scope="module")
def small(full: Any) -> Any:
    """The same model under a policy."""
    return adapter("embedded", "streaming", 40, device="cpu", batch_size=3)


def asked(kind: Any, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def plain(lm: Any, context: list[int], wanted: list[int]) -> tuple[float, bool]:
    """One dense forward of the model itself."""
    ids = torch.tensor([[*context, *wanted]])
    with torch.no_grad():
        logs = lm.model(ids).logits[0].log_softmax(-1)[len(context) - 1 : -1]
    total = logs.gather(1, torch.tensor(wanted)[:, None]).sum()
    return float(total), logs.argmax(-1).tolist() == wanted


def test_full_scores_as_the_plain_model(full: Any) -> None:
    pairs = [
        (p.prompt, " " + " ".join(p.trace.split()[:n]))
        for p, n in zip(PROBLEMS, (1, 9, 30), strict=True)
    ]
    pairs.append((PROBLEMS[0].prompt, " " + " ".join(reversed(PROBLEMS[0].trace.split()[:9]))))
    scored = full.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    assert [greedy for _, greedy in scored] == [True, True, True, False]
    for (context, continuation), (value, greedy) in zip(pairs, scored, strict=True):
        ids = full._encode_pair(context, continuation)
        wanted, same = plain(full, *ids)
        assert value == pytest.approx(wanted, abs=1e-3) and greedy == same


def test_rolling_scores_windows_of_the_whole_text(full: Any) -> None:
    text = PROBLEMS[0].prompt
    tokens = full.tok_encode(text, add_special_tokens=False)
    [value] = full.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)), True)
    assert value == pytest.approx(plain(full, [full.prefix_token_id], tokens)[0], abs=1e-2)
    short = adapter("embedded", "full", device="cpu", max_length=len(tokens) // 2)
    [less] = short.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)), True)
    first = plain(full, [full.prefix_token_id], tokens[: short.max_length])[0]
    assert less < first  # later windows add to the first


def test_a_policy_evicts_while_it_scores(full: Any, small: Any) -> None:
    problem = PROBLEMS[0]
    request = asked("loglikelihood", (problem.prompt, " " + problem.trace))
    [(kept, _)] = full.loglikelihood(request, disable_tqdm=True)
    [(lost, _)] = small.loglikelihood(request, disable_tqdm=True)
    assert lost < kept - 1
    seen = []
    context, wanted = small._encode_pair(problem.prompt, " " + problem.trace)
    kvpolicies.generate(
        small.model, [context], "streaming", 40, max_new_tokens=len(wanted), forced=[wanted],
        on_logits=lambda _, step, logits: seen.append(float(logits.log_softmax(-1)[wanted[step]])),
    )  # fmt: skip
    assert lost == pytest.approx(sum(seen), abs=1e-3)


@pytest.mark.parametrize("which", ["full", "small"])
def test_generation_is_generates(which: str, request: pytest.FixtureRequest) -> None:
    lm = request.getfixturevalue(which)
    prompts = [lm.tok_encode(problem.prompt) for problem in PROBLEMS]
    done = kvpolicies.generate(
        lm.model, prompts, lm.policy, lm.budget, max_new_tokens=20, eos_token_id=lm._stops
    )
    texts = [lm.tokenizer.decode(made.tokens, skip_special_tokens=True) for made in done]
    arguments = {"until": [], "max_gen_toks": 20}
    given = asked("generate_until", *((p.prompt, arguments) for p in PROBLEMS))
    assert lm.generate_until(given, disable_tqdm=True) == texts
    # Stop strings: a token of its own ends decoding, any other cuts the text.
    word = texts[0].split()[3]
    for until in ([word], [texts[0][4:9]], word):
        given = asked("generate_until", (PROBLEMS[0].prompt, {"until": until, "max_gen_toks": 20}))
        stop = until if isinstance(until, str) else until[0]
        [cut] = lm.generate_until(given, disable_tqdm=True)
        assert cut == texts[0].split(stop)[0]


def test_samples_differ_and_repeat(small: Any) -> None:
    arguments = {"do_sample": True, "temperature": 3.0, "max_gen_toks": 12}
    given = asked("generate_until", *[(PROBLEMS[0].prompt, arguments)] * 3)
    first = small.generate_until(given, disable_tqdm=True)
    assert len(set(first)) > 1 and first == small.generate_until(given, disable_tqdm=True)


def test_local_task_files_run(small: Any, tmp_path: Path) -> None:
    """A YAML and JSON lines, through lm-eval's own evaluator, by the registered name."""
    lines = []
    for problem in PROBLEMS:
        words = problem.trace.split()[:4]
        choices = [" ".join(words), " ".join(reversed(words))]
        row = {"question": problem.prompt, "answer": choices[0], "choices": choices, "label": 0}
        lines.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    for name, text in TEXTS.items():
        question = "" if name == "perplexity" else "{{question}}"
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\ndoc_to_text: '{question}'\n"
            f"dataset_kwargs:\n  data_files: {{test: {tmp_path / 'rows.jsonl'}}}\n"
            f"  cache_dir: {tmp_path / 'cache'}\n{text}"
        )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found: Any = simple_evaluate(
        model="kvpolicies",
        model_args={"model": "embedded", "policy": "streaming", "budget": "40", "device": "cpu"},
        tasks=list(TEXTS), task_manager=manager, bootstrap_iters=0, batch_size=3,
    )  # fmt: skip
    assert found is not None
    results: Any = found["results"]
    assert results["choose"]["acc,none"] == 1.0
    assert 1 < results["perplexity"]["word_perplexity,none"] < 1e6
    samples: Any = found["samples"]["generate"]
    given = asked("generate_until", *(s["arguments"][0] for s in samples))
    assert [s["resps"][0][0] for s in samples] == small.generate_until(given, disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"policy": "beacn"}, "did you mean 'beacon'"),
        ({"budget": "3"}, "leaves no slot"),
        ({"policy": "oracle"}, "looks ahead"),
        ({"batch_size": "auto"}, "batch_size must be a whole number"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
        ({"polcy": "h2o"}, "unknown argument 'polcy'"),
        ({"model": "./none"}, "no such folder"),
    ],
)
def test_bad_arguments_are_one_line(arguments: dict, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        adapter(**{"model": "embedded", **arguments})
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_refused(full: Any) -> None:
    short = adapter("embedded", "full", device="cpu", max_length=8)
    context, long = PROBLEMS[0].prompt, " " + " ".join(PROBLEMS[0].trace.split()[:9])
    with pytest.raises(UserError, match="does not fit max_length"):
        short.loglikelihood(asked("loglikelihood", (context, long)), disable_tqdm=True)
    with pytest.raises(UserError, match="leaves no room"):
        short.generate_until(asked("generate_until", (context, {"max_gen_toks": 8})), True)
    [(value, _)] = short.loglikelihood(
        asked("loglikelihood", (context, " " + PROBLEMS[0].trace.split()[0])), disable_tqdm=True
    )
    ids, wanted = full._encode_pair(context, " " + PROBLEMS[0].trace.split()[0])
    assert value == pytest.approx(plain(full, ids[-8:], wanted)[0], abs=1e-3)  # 8 and the last


def test_a_chat_is_rendered_as_a_study_renders_it(full: Any, monkeypatch: Any) -> None:
    tokenizer = of_bytes(THINKS)  # which adds a token to texts, where the template adds none
    talk: Any = [{"role": "system", "content": "Short."}, *user("6 * 7?")]
    for thinking in (None, False):
        own = adapter("embedded", thinking=thinking, device="cpu")
        monkeypatch.setattr(own, "tokenizer", tokenizer)
        prompts = Prompts(tokenizer, Form(thinking=thinking))
        assert own.tok_encode(own.apply_chat_template(talk)) == prompts.prompt(talk)
        begun = [*talk, {"role": "assistant", "content": "It is"}]
        assert own.apply_chat_template(begun, add_generation_prompt=False).endswith("It is")
    with pytest.raises(UserError, match="thinking must be true or false, got 'maybe'"):
        adapter("embedded", thinking="maybe", device="cpu")
    with pytest.raises(UserError, match="no chat template"):
        full.apply_chat_template(talk)
