"""A study asks what its deployment asks: the same tokens for the same words, in every form."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import pytest

from kvpolicies.config import Deployment
from kvpolicies.eval import prompts
from kvpolicies.eval.commands import generate
from kvpolicies.eval.study import Study
from kvpolicies.eval.tasks import Problem
from kvpolicies.models.form import RAW, Form
from kvpolicies.models.prompts import Prompts
from tests.support.tokenizers import CHAT, THINKS, of_bytes

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
    from kvpolicies.eval.serve.bodies import ChatBody, TextBody
    from kvpolicies.eval.serve.prompts import Encoder, Lengths

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
    from kvpolicies.eval.study import load_study

    form = {"template": "chat", "wrapper": "Q: {prompt}\n\nA:", "thinking": False,
            "special_tokens": True}  # fmt: skip
    file = tmp_path / "deploy.yaml"
    file.write_text(dump_yaml(Deployment(**form)))
    assert load_yaml(Deployment, file) == Deployment(**form)
    study = load_study(str(file))
    assert {key: asdict(study)[key] for key in form} == form
    assert isinstance(study, Form)
