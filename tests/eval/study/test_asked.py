"""A study asks what its deployment asks: the same tokens for the same words, in every form."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicies.cli import main
from kvpolicies.config import Deployment
from kvpolicies.errors import UserError
from kvpolicies.eval import report
from kvpolicies.eval.commands import generate
from kvpolicies.eval.display.pages import environment
from kvpolicies.eval.report import foreword, page
from kvpolicies.eval.study import asked, prompts, provenance
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.study.summary import summarise
from kvpolicies.eval.tasks.task import Problem
from kvpolicies.models import embedded
from kvpolicies.models.form import RAW, Form
from kvpolicies.models.prompts import Prompts
from tests.support.vocabularies import CHAT, THINKS, of_bytes, of_words

FORMS: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    (None, {"wrapper": "Question: {prompt}\nAnswer:"}),
    (CHAT, {}),
    (CHAT, {"template": "plain"}),
    (CHAT, {"special_tokens": True}),
    (THINKS, {"thinking": False, "wrapper": "{prompt} /no"}),
]
ASKED = "What is 6 * 7?<|end|>"


@pytest.mark.parametrize(("template", "form"), FORMS)
def test_studies_and_deployments_ask_the_same(template: str | None, form: dict[str, Any]) -> None:
    pytest.importorskip("fastapi")
    from kvpolicies.serve.bodies import ChatBody, TextBody
    from kvpolicies.serve.prompts import Encoder, Lengths

    tokenizer = of_bytes(template)
    study = Study(model="m", task="math500", data="-", **form)
    [request] = prompts.encode(study.resolved(), [Problem("p", ASKED, "42")], tokenizer)
    deployed = Deployment(**form)
    [ids] = generate._encoded(Prompts(tokenizer, deployed), [ASKED])
    encoder = Encoder(tokenizer, len(tokenizer), Lengths(1000, 10), deployed)
    message: Any = {"role": "user", "content": ASKED}
    assert request.prompt == ids == asyncio.run(encoder.prompt(ChatBody(messages=[message])))
    rendered = Prompts(tokenizer, deployed).text([message])
    [raw] = generate._encoded(Prompts(tokenizer, RAW), [rendered])
    sent = asyncio.run(encoder.prompt(TextBody(prompt=rendered)))
    assert raw == tokenizer(rendered)["input_ids"]
    # What clients send is no control token, unless the deployment says so.
    assert (sent == raw) is deployed.special_tokens and tokenizer.decode(sent) == "<s>" + rendered
    encoder.close()


def test_a_form_goes_through_files_and_options(tmp_path: Any) -> None:
    from kvpolicies.config import dump_yaml, load_yaml
    from kvpolicies.eval.study.config import load_study

    form = {"template": "chat", "wrapper": "Q: {prompt}\n\nA:", "thinking": False,
            "special_tokens": True}  # fmt: skip
    file = tmp_path / "deploy.yaml"
    file.write_text(dump_yaml(Deployment(**form)))
    assert load_yaml(Deployment, file) == Deployment(**form)
    study = load_study(str(file))
    assert {key: asdict(study)[key] for key in form} == form
    assert isinstance(study, Form)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A study of a model of one's own, without a chat template, on a task of one's own: its folder,
    beside what it was made of, and what it said on standard error."""
    folder = tmp_path_factory.mktemp("own")
    model, tokenizer = embedded.load()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "task.yaml").write_text(
        "prompt: '{{ problem }} plan'\nextract: [last_number]\nmax_new_tokens: 6\n"
    )
    problems = [{"id": f"p{i}", "problem": f"bob {i} Anna 3", "answer": "3"} for i in (7, 8)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, problems)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        heard: list[str] = []
        patch.setattr("sys.stderr.write", heard.append)
        assert main([
            "compare", "--model", "model", "--task", "task.yaml", "--data", "data.jsonl",
            "--policies", "random", "--budgets", "8", "--problems", "2", "--out", "study",
            "--wrapper", "ledger {prompt} #1",
        ]) == 0  # fmt: skip
    return folder, "".join(heard)


def test_the_form_goes_from_the_study_to_the_deployment(
    chain: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(chain[0])
    told = json.loads(Path("study/run.json").read_text())["prompts"]
    assert told["form"] == {"template": "plain", "wrapper": "ledger {prompt} #1",
                            "thinking": None, "special_tokens": False}  # fmt: skip
    assert main(["select", "study", "--memory", "1GB", "--batch", "2", "--max-tokens", "6",
                 "--tolerance", "1"]) == 0  # fmt: skip
    deploy = Path("deploy.yaml").read_text()
    assert "wrapper: 'ledger {prompt} #1'" in deploy and "template: plain" in deploy
    assert "# task.yaml asks: '{{ problem }} plan'" in deploy
    assert "does not know 2 of the 14 words" in deploy
    capsys.readouterr()
    assert main(["generate", "deploy.yaml", "--json", "--prompt", "bob 7 Anna 3 plan"]) == 0
    out = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in Path("study/results.jsonl").read_text().splitlines()]
    [row] = [r for r in rows if r["problem"] == "p7" and r["policy"] == "random"]
    assert (out["text"], out["prompt_tokens"]) == (row["text"], row["prompt_tokens"])
    assert row["prompt_tokens"] == 7


def test_unknown_words_are_counted_for_every_task(chain: tuple[Path, str]) -> None:
    folder, heard = chain
    line = (
        "The tokenizer does not know 2 of the 14 words that are asked, in 2 of 2 problems ('Anna')"
    )
    assert f"kvpolicies: {line}" in heard
    assert line.replace("'", "&#39;") in (folder / "study" / "report.html").read_text()
    study = Study(model="m", task="fidelity", data="-", max_new_tokens=2).resolved()
    problem = Problem("p", "ann bob", "", solution="eva bob bob")
    tokenizer = of_words("ann bob")
    told = asked.describe(study, prompts.encode(study, [problem], tokenizer), tokenizer)
    assert (told["words"], told["unknown"], told["problems_unknown"]) == (5, 1, 1)
    assert told["cut"] == 1 and len(asked.cautions(told)) == 2


def test_another_form_is_another_study(chain: tuple[Path, str]) -> None:
    folder, _ = chain
    record = json.loads((folder / "study" / "run.json").read_text())
    before = record["prompts"]
    for key, value in (("form", {**before["form"], "thinking": True}), ("chat_template", "0")):
        with pytest.raises(UserError, match="choose another folder"):
            provenance._check_form(folder, before, {**before, key: value})


@pytest.mark.parametrize(
    "change",
    [{"form": {"template": "chat", "colour": 1}}, {"form": []}, {"words": "many"}, {"some": None},
     {"example": {}}, {"example": {"problem": "p", "tokens": 1, "pieces": [[1, 2]]}}],
)  # fmt: skip
def test_what_is_no_record_of_how_it_asked_is_refused(
    chain: tuple[Path, str], change: dict[str, Any]
) -> None:
    record = json.loads((chain[0] / "study" / "run.json").read_text())
    assert asked.read(record, "here") == record["prompts"]
    assert asked.read({}, "here") is None
    record["prompts"].update(change)
    with pytest.raises(UserError, match="here: not the record of a study"):
        asked.read(record, "here")
    with pytest.raises(UserError, match="here: not the record of a study"):
        asked.read({"prompts": []}, "here")


def test_a_template_that_writes_the_date_is_told() -> None:
    tokenizer = of_bytes("{{ strftime_now('%d') }}" + CHAT)
    study = Study(model="m", task="math500", data="-").resolved()
    made = prompts.encode(study, [Problem("p", "1", "")], tokenizer)
    [line] = asked.cautions(asked.describe(study, made, tokenizer))
    assert "the day's date" in line


def test_the_report_shows_a_prompt_with_its_special_tokens(
    small_study: tuple[Study, Path],
) -> None:
    study, folder = small_study
    text = (folder / "report.html").read_text()
    record = json.loads((folder / "run.json").read_text())
    assert "ledger " in record["prompts"]["example"]["pieces"][0][0]
    assert record["prompts"]["example"]["pieces"][0][0] in text
    tokenizer = of_bytes(CHAT)
    own = replace(study, model="m", task="math500", data="-")
    made = prompts.encode(own.resolved(), [Problem("<p>", "1 < 2" * 999, "")], tokenizer)
    told = asked.describe(own, made, tokenizer)
    template = "{% include 'prompt.html.j2' %}"
    shown = environment(page.TEMPLATE.parent).from_string(template).render(asked=told)
    assert "<b>&lt;|turn|&gt;</b>user\n1 &lt; 21 &lt; 2" in shown and "&lt;p&gt;" in shown
    assert "tokens not shown" in shown and len(shown) < 3000


def counts(finish: dict[tuple[str, str], int], of: int = 4) -> list[str]:
    """What is said of a study with so many samples cut off of each cell."""
    study = Study(policies=("random", "oracle", "streaming"), budgets=("40", "50")).resolved()
    rest = {"correct": 1, "lookups_right": 1, "lookups": 1, "length": 9, "slots": 40,
            "max_slots": 40, "cache_bytes": 1, "state_bytes": 0, "seconds": 1, "tokens": [1],
            "sample": 0}  # fmt: skip
    rows = [
        {"policy": policy, "budget": budget, "problem": str(i), **rest,
         "finish": "length" if i < cut else "stop",
         **({"mode": "told"} if policy == "oracle" else {})}
        for (policy, budget), cut in finish.items()
        for i in range(of)
    ]  # fmt: skip
    return foreword.sentences(study, summarise(study, rows), None)


def test_samples_that_were_cut_off_are_counted_for_full_and_each_policy() -> None:
    full, at40, at50 = counts({
        ("full", "full"): 1, ("random", "40"): 4, ("random", "50"): 0,
        ("streaming", "40"): 0, ("streaming", "50"): 0, ("oracle", "40"): 3,
    })  # fmt: skip
    assert full.startswith("1 of full's 4 samples were cut off at the limit of new tokens")
    assert at40 == "Cut off at budget 40: random 4 of 4; none of streaming."
    assert at50 == "Cut off at budget 50: none of random, streaming."
    assert counts({("full", "full"): 0, ("random", "40"): 2})[0].startswith("None of full's 4")
    assert counts({("full", "full"): 0, ("random", "40"): 0}) == [
        "No sample was cut off at the limit of new tokens."
    ]


def test_the_terminal_says_so_before_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "compare --policies random --budgets 30 --problems 2 --length 60 --max-new-tokens 5"
    assert main([*command.split(), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    before = out[: out.index("exact answers")]
    assert "Prompts are rendered without a chat template, as they are written." in before
    assert "2 of full's 2 samples were cut off" in before
    assert "Cut off at budget 30: random 2 of 2." in before
    text = (tmp_path / report.NAME).read_text()
    assert text.index("2 of full&#39;s 2 samples were cut off") < text.index("<table")
