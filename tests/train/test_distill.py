"""The recipe distill: the student sees what its cache would hold, and learns to predict densely."""

import copy
import json
import weakref
from dataclasses import replace

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvpolicies
from kvpolicies.cli import main
from kvpolicies.errors import UserError
from kvpolicies.head import last_states, logits_of
from kvpolicies.learned.scorer import Scorer
from kvpolicies.train import distill as module_of
from kvpolicies.train.distill import Distill
from kvpolicies.train.fit import new_scorer
from kvpolicies.train.packing import pack
from kvpolicies.train.recipe import Recipe
from tests.kvpolicies.test_families import model_of
from tests.support.models import VOCABULARY, prompts, tiny
from tests.support.scorers import random_scorer

RECIPE = Recipe(recipe="distill", sequence=96, budget=(24,), window=8, delay=8, min_future=8)


def module(kind: str, **options: object) -> tuple[Distill, Scorer]:
    """A tiny model's, with a scorer that has opinions."""
    model = copy.deepcopy(tiny())
    recipe = replace(RECIPE, kind=kind, **options)
    scorer = random_scorer(new_scorer(recipe, model).config)
    return Distill(model, scorer, recipe), scorer


def rows() -> tuple[Tensor, Tensor]:
    packed = pack(prompts(90, 55, 37), 96)
    return torch.stack([r.tokens for r in packed]), torch.stack([r.documents for r in packed])


def test_some_recipes_cannot_distill() -> None:
    for options in ({"kind": "trimkv"}, {"budget": (24, 32)}):
        with pytest.raises(UserError, match="recipe distill needs one budget"):
            replace(RECIPE, **options)


@pytest.mark.parametrize("kind", ["kvpop", "kvpop_mlp", "dms"])
def test_the_student_predicts_as_the_policy_does_when_decoding(kind: str, tmp_path) -> None:
    """The training forward's logits are those of the decode loop, token by token."""
    distill, scorer = module(kind)
    scorer.save_pretrained(tmp_path)
    (tokens,) = prompts(80)
    ids = torch.tensor([tokens])
    documents = torch.zeros_like(ids)

    def attend(lesson, seen) -> Tensor:
        r, decay = lesson.scores(scorer), scorer.age(lesson.layer) if scorer.config.ages else None
        return distill.attention(r, decay, documents, seen)

    with torch.no_grad():
        states = distill._pupil[0].run(ids, documents, attend, every=True)
        trained = logits_of(distill.student, states)[0]
    decoded: list[Tensor] = []
    budget = distill.recipe.budgets[0]
    kvpolicies.generate(
        distill.student,
        [tokens[:20]],
        f"{kind}(scorer={str(tmp_path)!r})",
        budget,
        max_new_tokens=60,
        forced=[tokens[20:]],
        on_logits=lambda index, step, logits: decoded.append(logits.clone()),
    )
    assert len(decoded) == 60
    found = torch.stack(decoded)
    assert torch.allclose(found, trained[19:79], atol=2e-4)
    with torch.no_grad():
        dense = distill.student(ids).logits[0]
    assert (dense[19:79] - found).abs().max() > 0.01


def test_both_losses_train_their_own_part() -> None:
    distill, _ = module("kvpop_mlp")
    tokens, documents = rows()
    parts, loss = distill.step(tokens, documents)
    assert torch.allclose(loss, parts["boundary"] + parts["kl"], rtol=1e-5)
    assert parts["kl"] > 0
    loss.backward()
    both = {n: p.grad.clone() for n, p in distill.named_parameters() if p.grad is not None}
    assert any(n.startswith("student.") for n in both)
    distill.zero_grad()
    distill.recipe = replace(distill.recipe, kl=0.0)
    distill.step(tokens, documents)[1].backward()
    for name, p in distill.named_parameters():
        assert p.grad is not None
        if name.startswith("scorer."):  # no gradient passes through the ranks
            assert torch.allclose(p.grad, both[name], atol=1e-7)
        else:
            assert not p.grad.any()
    assert not any(p.grad is not None for p in distill.teacher.model.parameters())


def test_padding_and_an_equal_student_cost_nothing() -> None:
    distill, _ = module("kvpop_mlp", kl_top=VOCABULARY)
    tokens, documents = rows()
    dense = distill.teacher.run(tokens, documents, lambda *_: None, every=True)
    assert distill.divergence(dense, tokens, documents).item() == pytest.approx(0, abs=1e-5)
    spoilt = dense.clone()
    spoilt[0, 90:] += torch.randn(6, dense.shape[-1])
    assert documents[0].unique(return_counts=True)[1].tolist() == [90, *[1] * 6]
    assert distill.divergence(spoilt, tokens, documents).item() == pytest.approx(0, abs=1e-5)


def plain(distill: Distill, states: Tensor, tokens: Tensor, documents: Tensor) -> Tensor:
    """The divergence of all logits at once."""
    with torch.no_grad():
        dense = distill.teacher.run(tokens, documents, lambda *_: None, every=True)
        top, which = logits_of(distill.teacher.model, dense).topk(distill.recipe.kl_top, dim=-1)
        p = top.softmax(dim=-1)
    q = logits_of(distill.student, states).softmax(dim=-1).gather(-1, which)
    lengths = [[int((row == d).sum()) for d in row] for row in documents]
    real = torch.tensor(lengths) > 1
    each = (p * (p / q).log()).sum(dim=-1) * real
    return (each.sum(dim=-1) / real.sum(dim=-1)).mean()


@pytest.mark.parametrize("part", [7, 32, 1000])
def test_parts_have_the_loss_and_gradients_of_the_whole(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of, "PART", part)
    distill, _ = module("kvpop_mlp", kl_top=20)
    with torch.no_grad():  # the student is not its teacher any more
        for weight in distill.student.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    tokens, documents = rows()
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for divergence in (distill.divergence, lambda *given: plain(distill, *given)):
        distill.zero_grad()
        states = distill._pupil[0].run(tokens, documents, lambda *_: None, every=True)
        loss = divergence(states, tokens, documents)
        loss.backward()
        grads = {
            n: p.grad.clone() for n, p in distill.student.named_parameters() if p.grad is not None
        }
        found.append((loss.detach(), grads))
    (loss, grads), (expected, others) = found
    assert expected > 0.01 and torch.allclose(loss, expected, rtol=1e-5)
    assert grads.keys() == others.keys() and len(grads) > 10
    for name, grad in grads.items():
        assert (grad - others[name]).abs().max() <= 1e-6 * max(1, float(grad.abs().max())), name


class Alive(TorchDispatchMode):
    """The most numbers over the vocabulary that were alive at once, in tensors of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.dim() == 3 and x.shape[-1] == VOCABULARY:
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.held:
                    self.held[key] = storage.nbytes() // 4
                    weakref.finalize(storage, self.held.pop, key, None)
                self.most = max(self.most, sum(self.held.values()))
        return out


def test_logits_of_a_part_are_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: as much for a row of 96 tokens as for one of 24."""
    most = {}
    for length in (24, 96):
        monkeypatch.setattr(module_of, "PART", 8)
        distill, _ = module("kvpop_mlp", kl_top=4)
        (ids,) = prompts(length)
        tokens = torch.tensor([ids])
        documents = torch.zeros_like(tokens)
        states = distill._pupil[0].run(tokens, documents, lambda *_: None, every=True)
        with Alive() as alive:
            distill.divergence(states, tokens, documents).backward()
        most[length] = alive.most
    assert 8 * VOCABULARY <= most[96] == most[24] < 16 * 8 * VOCABULARY


@pytest.mark.parametrize(
    "case", ["gpt-oss, sinks", "gemma2, soft-capped", "gemma3, a rotation a kind of layer"]
)
def test_two_halves_are_the_model(case: str) -> None:
    """Soft caps on logits included."""
    model = model_of(case)
    tokens = torch.tensor(prompts(20))
    at = torch.arange(20)[None]
    with torch.no_grad():
        whole = model(input_ids=tokens, position_ids=at, use_cache=False).logits
        states = last_states(model)(tokens, at)
        assert torch.allclose(logits_of(model, states[:, 5:9]), whole[:, 5:9], atol=1e-5)
        again = model(input_ids=tokens, position_ids=at, use_cache=False).logits
    assert torch.equal(again, whole)


def test_sparse_targets_change_what_the_scorer_learns() -> None:
    tokens, documents = rows()
    parts = [
        module("kvpop_mlp", lse=lse)[0].step(tokens, documents)[0] for lse in ("dense", "sparse")
    ]
    assert parts[0]["kl"] == parts[1]["kl"]
    assert parts[0]["regression"] != parts[1]["regression"]


@pytest.mark.timeout(120)
def test_a_run_brings_the_student_nearer_and_ships_both(tmp_path, capsys) -> None:
    pytest.importorskip("lightning")
    out = tmp_path / "run"
    given = {
        "recipe": "distill", "kind": "kvpop_mlp", "sequence": 320, "budget": 69, "delay": 16,
        "min_future": 16, "batch": 2, "held_out": 4, "warmup": 2, "lr": 0.01, "steps": 16,
        "device": "cpu", "log_every": 1, "base_lr": 1e-4, "out": str(out), "checkpoint_every": 8,
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(given))
    assert main(["train", str(path)]) == 0
    text = (out / "logs" / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    column = text[0].split(",").index("train/kl")
    kl = [float(line.split(",")[column]) for line in text[1:] if line.split(",")[column]]
    assert len(kl) == 16 and sum(kl[-4:]) < 0.7 * sum(kl[:4])
    assert json.loads((out / "run.json").read_text())["finished"]
    command = ["generate", "--model", str(out / "model"), "--budget", "69", "--raw", "--prompt"]
    prompt = "ledger bob 7 ann 3 plan #1 ann #2 bob #3 answer go"
    policy = f"kvpop_mlp(scorer={str(out / 'scorer')!r})"
    assert main([*command, prompt, "--policy", policy, "--max-new-tokens", "8"]) == 0
    # Of the model as it was before, whose config is the same, the scorer is not.
    command[2] = "embedded"
    capsys.readouterr()
    assert main([*command, prompt, "--policy", policy, "--max-new-tokens", "8"]) == 2
    assert "of this config with other weights: " in capsys.readouterr().err
