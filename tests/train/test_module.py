"""The training step: what a layer is shown, and that its gradients are those of plain autograd."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvpolicies.architecture import find_ropes
from kvpolicies.learned.config import KINDS
from kvpolicies.learned.mask import dense_mask
from kvpolicies.learned.targets import Target
from kvpolicies.train.fit import new_scorer
from kvpolicies.train.module import Frozen, share
from kvpolicies.train.objective import FIGURES, comparable, decay_of, figures, held
from kvpolicies.train.packing import pack
from kvpolicies.train.recipe import Recipe
from kvpolicies.train.teacher import LabelledFeatures, Teacher
from tests.support.models import prompts, tiny

RECIPE = Recipe(sequence=96, budget=(24, 32), window=8, delay=8, min_future=8, regression=0.1)


def module(kind: str, **options: object) -> Frozen:
    """A tiny model's, whose scorer's weights were moved off their start."""
    recipe = replace(RECIPE, kind=kind, **options)
    scorer = new_scorer(recipe, tiny())
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in scorer.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=g)
    return Frozen(tiny(), scorer, recipe)


def loss_of(frozen: Frozen, lesson: LabelledFeatures) -> Tensor:
    """A layer's loss with its graph."""
    scores, decay = comparable(frozen.scorer, lesson), decay_of(frozen.scorer, lesson.layer)
    return frozen.objective(scores, decay, lesson, 0).loss


def rows() -> tuple[Tensor, Tensor]:
    """Tokens and documents [3, 96]: several documents a row, and some padding."""
    packed = pack(prompts(90, 55, 37, 40, 61, 5), 96)
    return torch.stack([r.tokens for r in packed]), torch.stack([r.documents for r in packed])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_autograd_over_all_layers(kind: str) -> None:
    frozen = module(kind)
    tokens, documents = rows()
    means, loss = frozen.step(tokens, documents)
    loss.backward()
    surrogate = {n: p.grad.clone() for n, p in frozen.named_parameters() if p.grad is not None}
    assert set(surrogate) == {n for n, _ in frozen.named_parameters()}
    frozen.zero_grad()
    lessons: list[LabelledFeatures] = []
    frozen.teacher.teach(tokens, documents, lessons.append)
    plain = torch.stack([loss_of(frozen, x) for x in lessons]).mean()
    plain.backward()
    assert torch.allclose(loss, plain, rtol=1e-6) and torch.allclose(means["loss"], plain)
    for name, p in frozen.named_parameters():
        assert p.grad is not None
        assert (p.grad - surrogate[name]).abs().max() <= 1e-6, name
    assert max(float(grad.abs().max()) for grad in surrogate.values()) > 1e-4


def test_only_the_scorer_is_trained_and_saved() -> None:
    frozen = module("kvpop")
    assert all(name.startswith("scorer.") for name in frozen.state_dict())
    assert not any(p.requires_grad for p in frozen.teacher.model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_packed_documents_teach_what_each_teaches_alone(family: str) -> None:
    model = tiny(family)
    teacher = Teacher(model, Target(8), needs_input=True, unrotated=False)
    documents = prompts(50, 30)
    lessons: dict[str, list[LabelledFeatures]] = {"packed": [], "0": [], "1": []}
    (row,) = pack(documents, 96)
    teacher.teach(row.tokens[None], row.documents[None], lessons["packed"].append)
    for n, document in enumerate(documents):
        ids = torch.tensor([document])
        teacher.teach(ids, torch.zeros_like(ids), lessons[str(n)].append)
    for n, part in (("0", slice(0, 50)), ("1", slice(50, 80))):
        for together, alone in zip(lessons["packed"], lessons[n], strict=True):
            for name in ("keys", "values", "inputs", "targets", "futures"):
                axis = 1 if name in ("inputs", "futures") else 2
                own = getattr(together, name).narrow(axis, part.start, part.stop - part.start)
                assert torch.allclose(own.float(), getattr(alone, name).float(), atol=2e-5), name


def test_keys_are_turned_back_where_the_scorer_wants_them_so() -> None:
    tokens, documents = rows()
    lessons: list[list[LabelledFeatures]] = [[], []]
    for unrotated in (False, True):
        teacher = Teacher(tiny(), Target(8), False, unrotated)
        teacher.teach(tokens, documents, lessons[unrotated].append)
    ropes = find_ropes(tiny())
    at = torch.arange(96) - torch.searchsorted(documents, documents)
    for turned, plain in zip(*lessons, strict=True):
        ropes[turned.layer].prepare(96, tokens.device)
        assert not torch.allclose(turned.keys, plain.keys)
        again = ropes[turned.layer].rotate(plain.keys, at)
        assert torch.allclose(again, turned.keys, atol=1e-5)


def test_one_layers_tensors_are_alive_at_a_time() -> None:
    frozen, (tokens, documents) = module("kvpop"), rows()
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    inner = frozen.objective

    def spy(scores: Tensor, decay: Tensor | None, lesson: LabelledFeatures, step: int):
        alive.append(sum(ref() is not None for ref in seen))
        seen.extend(map(weakref.ref, (lesson.keys, lesson.values, lesson.targets, scores)))
        return inner(scores, decay, lesson, step)

    frozen.objective = spy  # type: ignore[assignment]
    frozen.step(tokens, documents)
    assert alive == [0, 0]


def test_the_loss_does_not_depend_on_how_rows_are_spread() -> None:
    frozen, (tokens, documents) = module("kvpop_mlp"), rows()
    whole = frozen.step(tokens, documents)[0]["loss"]
    each = [
        frozen.step(tokens[n : n + 1], documents[n : n + 1])[0]["loss"] for n in range(len(tokens))
    ]
    assert torch.allclose(whole, torch.stack(each).mean(), rtol=1e-5)


def test_the_first_steps_may_regress_alone() -> None:
    frozen, (tokens, documents) = module("kvpop_mlp", regress_first=3, regression=0.5), rows()
    means, loss = frozen.step(tokens, documents)
    assert torch.allclose(loss, 0.5 * means["regression"])


@pytest.mark.parametrize("kind", ["kvpop", "kvpop_mlp", "dms"])
def test_sparse_targets_follow_the_scorer_and_figures_do_not(kind: str) -> None:
    """What the scorer would keep, in training; judged by dense targets, as any other."""
    frozen, (tokens, documents) = module(kind, budget=(24,), lse="sparse"), rows()
    dense = module(kind, budget=(24,))
    lessons: list[list[LabelledFeatures]] = [[], []]
    for one, its in zip((frozen, dense), lessons, strict=True):
        one.learn = lambda lesson, _, to=its: to.append(lesson)  # type: ignore[method-assign]
        with pytest.raises(IndexError):  # nothing was learned
            one.step(tokens, documents)
    for sparse, plain in zip(*lessons, strict=True):
        expires = held(frozen.recipe, frozen.scorer, plain)
        seen = dense_mask(expires, documents)
        assert int(seen.sum(-1).max()) == 24
        # Fewer keys to share a query's attention: no key is worth less to it.
        assert bool((sparse.targets - plain.targets > -1e-5).all())
        assert (sparse.targets - plain.targets).max() > 0.1
    judged: list[list[LabelledFeatures]] = [[], []]
    for one, its in zip((frozen, dense), judged, strict=True):
        one.judge = its.append  # type: ignore[method-assign]
        one.validation_step({"tokens": tokens, "documents": documents}, 0)
    for a, b in zip(*judged, strict=True):
        assert torch.equal(a.targets, b.targets)


@pytest.mark.parametrize("kind", KINDS)
def test_figures_have_every_budget_and_head(kind: str) -> None:
    frozen, (tokens, documents) = module(kind), rows()
    tables: list[Tensor] = []
    frozen.teacher.teach(
        tokens[:1],
        documents[:1],
        lambda x: tables.append(figures(frozen.recipe, frozen.scorer, x)),
    )
    for table in tables:
        assert table.shape == (2, 2, len(FIGURES)) and not table.isnan().any()
        assert bool(((table[..., :3] >= 0) & (table[..., :3] <= 1)).all())


def test_the_learning_rate_rises_and_falls() -> None:
    recipe = replace(RECIPE, steps=10, warmup=4)
    rates = [share(recipe, step) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[10] == 0.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert share(replace(recipe, schedule="constant"), 9) == 1.0
    assert share(replace(recipe, schedule="linear"), 7) == 0.5
