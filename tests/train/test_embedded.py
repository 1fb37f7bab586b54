"""The embedded model loads, is small, solves its task; its training resumes exactly."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvpolicies.errors import UserError
from kvpolicies.eval.tasks import ledger
from kvpolicies.models import embedded
from kvpolicies.train.embedded import card as embedded_card
from kvpolicies.train.embedded import data as embedded_data
from kvpolicies.train.embedded import run as train_embedded


def test_the_weights_are_packaged_and_small() -> None:
    with embedded.assets() as folder:
        assert all((folder / name).is_file() for name in (*embedded.FILES, "README.md"))
        assert (folder / "model.safetensors").stat().st_size <= 3_000_000


def test_missing_assets_are_named_in_one_line() -> None:
    with pytest.raises(UserError, match="lacks config") as caught, embedded.assets("nothing"):
        pass
    assert "\n" not in str(caught.value)


def test_it_loads_as_the_architecture_that_its_card_states() -> None:
    model, tokenizer = embedded.load()
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (4, 128, 32)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.max_position_embeddings >= 2048 and config.tie_word_embeddings
    assert model.dtype == torch.float32 and not model.training
    assert tokenizer.get_vocab() == {word: i for i, word in enumerate(ledger.vocabulary())}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert embedded.load(torch.bfloat16)[0].dtype == torch.bfloat16


def test_greedy_decoding_solves_short_held_out_problems() -> None:
    model, tokenizer = embedded.load()
    problems = [ledger.make_problem(seed, steps=4 + seed % 3) for seed in range(5000, 5008)]
    heard: list[int] = []
    solved = embedded_card.solve(model, tokenizer, problems, batch_size=4, on_done=heard.append)
    assert [s.problem for s in solved] == problems and heard == [4, 4]
    for one in solved:
        lookups = 2 * one.problem.steps
        assert one.grade == ledger.LedgerGrade(True, lookups, lookups)


def test_left_padding_changes_no_word() -> None:
    model, tokenizer = embedded.load()
    problems = [ledger.make_problem(5100, steps=2, names=4), ledger.make_problem(5101, steps=5)]
    together = embedded_card.solve(model, tokenizer, problems, batch_size=2)
    alone = embedded_card.solve(model, tokenizer, problems, batch_size=1)
    assert together == alone


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_training_gives_the_same_weights_twice_and_resumed(tmp_path: Path) -> None:
    recipe = train_embedded.SMOKE
    whole = train_embedded.train(recipe, 3, tmp_path / "whole").model.state_dict()
    train_embedded.train(recipe, 3, tmp_path / "parts", stop_after=2)
    train_embedded.train(recipe, 3, tmp_path / "parts", stop_after=3)  # saves off the beat, too
    resumed = train_embedded.train(recipe, 3, tmp_path / "parts").model.state_dict()
    again = train_embedded.train(recipe, 3, tmp_path / "again").model.state_dict()
    other = train_embedded.train(recipe, 4, tmp_path / "other").model.state_dict()
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]) and torch.equal(weight, again[name]), name
    assert not all(torch.equal(weight, other[name]) for name, weight in whole.items())


@pytest.mark.usefixtures("one_thread")
def test_the_script_writes_a_folder_that_transformers_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train_embedded.main(["--smoke", "--problems", "1", "--out", str(tmp_path)])
    assert "exact answers: " in capsys.readouterr().out
    assert "| 150-800 |" in (tmp_path / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(model.model.norm.weight, weights["model.norm.weight"])
    assert AutoTokenizer.from_pretrained(tmp_path)("step #48").input_ids == [5, 100]


@pytest.mark.usefixtures("one_thread")
def test_another_recipe_does_not_continue_a_run(tmp_path: Path) -> None:
    train_embedded.train(train_embedded.SMOKE, 0, tmp_path, stop_after=1)
    with pytest.raises(UserError, match="another recipe or seed"):
        train_embedded.train(train_embedded.SMOKE, 1, tmp_path)


def test_every_trace_token_and_nothing_else_carries_loss() -> None:
    problem = ledger.make_problem(-3, steps=3)
    ids = {word: token for token, word in enumerate(ledger.vocabulary())}
    tokens, labels = embedded_data.collate([embedded_data.trace_line(problem)], ids)
    prompt = len(problem.prompt.split())
    assert (labels[0, :prompt] == embedded_data.IGNORED).all()
    assert torch.equal(labels[0, prompt:], tokens[0, prompt:])


@pytest.mark.parametrize("step", [0, 200, 400, 1200])
def test_training_data_are_a_function_of_seed_and_step(step: int) -> None:
    ids = {word: token for token, word in enumerate(ledger.vocabulary())}
    stages = train_embedded.EmbeddedRecipe().stages
    first = embedded_data.training_batch(stages, 0, step, ids)
    again = embedded_data.training_batch(stages, 0, step, ids)
    other = embedded_data.training_batch(stages, 1, step, ids)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first[0].shape != other[0].shape or not torch.equal(first[0], other[0])
