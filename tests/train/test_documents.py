"""Columns, chats and files: which text of a record is trained on."""

import json
from typing import ClassVar

import pytest

from kvpolicies.errors import UserError
from kvpolicies.eval.study import prompts
from kvpolicies.eval.study.config import Study
from kvpolicies.eval.tasks import ledger
from kvpolicies.eval.tasks.task import Problem
from kvpolicies.models import embedded
from kvpolicies.models.form import Form
from kvpolicies.train import sources
from kvpolicies.train.documents import columns_of, encoder
from kvpolicies.train.recipe import Recipe
from tests.support import vocabularies
from tests.support.vocabularies import CHAT, of_bytes

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
THINKS = (
    "{% for m in messages %}<{{ m.role }}>[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
)


class Letters:
    """A tokenizer of characters."""

    eos_token_id, unk_token_id = 0, None
    added_tokens_decoder: ClassVar[dict] = {}
    all_special_tokens: tuple[str, ...] = ()

    def __init__(self, template: str = ""):
        self.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, turns, tokenize: bool, **switches: object) -> str:
        from jinja2 import Template

        return Template(self.chat_template).render(messages=turns, **switches)


def text(record, template: str = "", how: str = "auto", columns=()) -> str:
    names = columns_of(record, columns, "here")
    return "".join(chr(i) for i in encoder(Letters(template), names, Form(how), "here")(record))


def test_known_columns_are_found():
    assert text({"text": "abc", "id": 3}) == "abc\0"
    assert text({"problem": "p", "solution": "s"}) == "ps\0"
    assert text({"problem": "p", "solution": "s"}, TEMPLATE) == "<user>p<assistant>s"
    assert text({"problem": "p", "solution": "s"}, TEMPLATE, "plain") == "ps\0"
    assert text({"text": "abc"}, TEMPLATE) == "abc\0"
    assert text({"text": "abc"}, TEMPLATE, "chat") == "<user>abc"
    assert text({"a": "1", "b": "2", "c": "3"}, columns=("c", "a", "b")) == "3\n\n1\n\n2\0"
    assert (
        text({"a": "1", "b": "2", "c": "3"}, TEMPLATE, columns=("c", "a", "b")) == "3\n\n1\n\n2\0"
    )
    assert text({"problem": "p", "solution": None}) == ""
    with pytest.raises(UserError, match="no column 'x'; there are a"):
        columns_of({"a": 1}, ["x"], "here")
    with pytest.raises(UserError, match="name the columns to read; there are a"):
        columns_of({"a": 1}, [], "here")
    with pytest.raises(UserError, match="no chat template"):
        text({"text": "abc"}, "", "chat")


def test_nemotrons_messages_are_read():
    """As nvidia/Nemotron-Math-v2 has them: reasoning apart, tool calls, content that is null."""
    record = {
        "expected_answer": "4",
        "problem": "2+2",
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{}]},
            {"role": "assistant", "content": "4"},
        ],
    }
    thought = "<think>\nhm\n</think>\n\n"
    assert text(record, TEMPLATE) == f"<user>2+2?<assistant>{thought}<assistant>4"
    assert text(record, THINKS) == "<user>[]2+2?<assistant>[hm]<assistant>[]4"
    as_text = {"messages": json.dumps(record["messages"])}
    assert text(as_text, TEMPLATE) == text(record, TEMPLATE)
    sharegpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert text(sharegpt, TEMPLATE) == "<user>a<assistant>b"
    with pytest.raises(UserError, match="list of role and content"):
        text({"messages": [{"role": "user", "content": 7}]}, TEMPLATE)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, {}),
        (None, {"wrapper": "Q: {prompt}\n\n"}),
        (CHAT, {}),
        (vocabularies.THINKS, {"thinking": False, "wrapper": "{prompt}!"}),
        (CHAT, {"template": "plain"}),
    ],
)
def test_documents_begin_with_what_a_study_asks(template, form):
    """And go on with what it feeds."""
    tokenizer = of_bytes(template)
    recipe = Recipe(data="d.jsonl", **form)
    encode = encoder(tokenizer, ("problem", "solution"), recipe, "here")
    study = Study(model="m", task="fidelity", data="-", **form).resolved()
    problem = Problem("p", "6 * 7?", "", solution="It is 42.")
    [request] = prompts.encode(study, [problem], tokenizer)
    document = encode({"problem": problem.text, "solution": problem.solution})
    assert request.forced and request.forced == tokenizer.encode(
        problem.solution, add_special_tokens=False
    )
    if form.get("thinking") is False:  # the template says so where an answer is asked for
        assert document[: len(request.prompt) - 15] == request.prompt[:-15]
    else:
        whole = [*request.prompt, *request.forced]
        assert document[: len(whole)] == whole
    assert document.count(tokenizer.eos_token_id) == (
        2 if recipe.template != "plain" and template else 1
    )


def test_ledger_documents_take_the_form_too():
    tokenizer = embedded.load()[1]
    plain, wrapped = (
        sources.Ledgers(tokenizer, 0, Recipe(wrapper=wrapper)).held_out(1)[0]
        for wrapper in ("", "{prompt} go")
    )
    assert len(wrapped) == len(plain) + 1


def test_json_lines_hold_some_out(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": chr(97 + n) * 3}) for n in range(10)))
    recipe = Recipe(data=str(path), held_out=2)
    source = sources.open_source(recipe, sources.find(recipe), Letters())
    assert [chr(d[0]) for d in source.held_out(2)] == ["a", "b"]
    orders = ["".join(chr(d[0]) for d in source.block(epoch, 0)) for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list("cdefghij") and orders[0] != orders[1]
    assert source.block(0, 8) == []
    with pytest.raises(UserError, match="none is left to train on"):
        sources.find(Recipe(data=str(path), held_out=10))
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"d\.jsonl:2: malformed JSON"):
        sources.find(recipe)


def test_datasets_are_read_from_a_folder_and_as_a_stream(tmp_path):
    pytest.importorskip("datasets")
    lines = "\n".join(json.dumps({"text": chr(97 + n) * 3}) for n in range(20))
    (tmp_path / "train.jsonl").write_text(lines)
    found = []
    for stream in (False, True):
        recipe = Recipe(data=str(tmp_path), held_out=3, stream=stream)
        source = sources.open_source(recipe, sources.find(recipe), Letters())
        assert [chr(d[0]) for d in source.held_out(3)] == ["a", "b", "c"]
        whole = source.block(0, 0)
        assert source.block(0, 5) == whole[5:] and source.block(0, 17) == []
        assert source.block(0, 0) == whole != source.block(1, 0)
        found.append(sorted(map(tuple, whole)))
    assert found[0] == found[1] and len(found[0]) == 17


def test_a_folder_that_datasets_cannot_read_is_one_line(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        sources.find(Recipe(data=str(tmp_path)))
    assert len(str(caught.value).splitlines()) == 1


def test_ledger_problems_are_none_that_others_use():
    """Studies' seeds are >= 0; the shipped model was trained on runs 0 and up."""
    tokenizer = embedded.load()[1]
    source = sources.Ledgers(tokenizer, seed=0)
    block, held_out = source.block(0, 0), source.held_out(8)
    assert block == sources.Ledgers(tokenizer, seed=0).block(0, 0) != source.block(0, 128)
    assert not {tuple(d) for d in held_out} & {tuple(d) for d in block}
    seen = tokenizer.decode(held_out[0])
    problem = ledger.make_problem(ledger.training_seed(sources.RUN, 0, 0))
    assert seen == f"{problem.prompt} {problem.trace}"
    with pytest.raises(UserError, match="trained on ledger traces"):
        sources.Ledgers(of_bytes(), seed=0).held_out(1)
