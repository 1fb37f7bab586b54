"""Pages and plans without vLLM: what vLLM's scheduler does to a request changes nothing of it."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvpolicies.errors import UserError
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.policy import Geometry
from kvpolicies.rope import Rope
from kvpolicies.rows import Counts
from kvpolicies.slots import SlotGroup
from kvpolicies.step import LayerInput, attend
from kvpolicies.vllm.pages import PagedSlots, places
from kvpolicies.vllm.planning import PageTokens, Planner, Told
from kvpolicies.vllm.terms import Terms

HEADS, GROUPS, DIM, PAGES = 2, 2, 16, 9
SOFTMAX = LogitTransform(DIM**-0.5)


class Sequence(NamedTuple):
    """A request's tokens, of which the first ones are prompt."""

    queries: Tensor  # [H, G, T, D]
    keys: Tensor  # [H, T, D]
    values: Tensor
    prompt: int

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.queries, self.keys, self.values]

    def until(self, length: int) -> "Sequence":
        """Its first tokens."""
        queries, keys, values = (t[..., :length, :] for t in self.tensors)
        return Sequence(queries, keys, values, self.prompt)


def layer_input(tensors: list[Tensor]) -> LayerInput:
    queries, keys, values = tensors
    return LayerInput(queries, keys, values, None, SOFTMAX)


def sequence(seed: int, length: int, prompt: int) -> Sequence:
    g = torch.Generator().manual_seed(seed)
    draw = [torch.randn(*s, length, DIM, generator=g) for s in ((HEADS, GROUPS), (HEADS,))]
    return Sequence(draw[0], draw[1], torch.randn(HEADS, length, DIM, generator=g), prompt)


def geometry(terms: Terms) -> Geometry:
    cpu = torch.device("cpu")
    sizes = (1, HEADS, GROUPS, terms.slots, DIM, torch.float32, cpu, terms.max_length)
    return Geometry(*sizes)


def alone(terms: Terms, given: Sequence) -> tuple[Tensor, list[list[int]]]:
    """(outputs [H, G, T, D], kept positions a head): its prompt whole, then token by token."""
    group = SlotGroup(geometry(terms), terms.resolved(), [0], [Rope(None)])
    group.reset(0, terms.schedule(), 0)
    outputs = []
    cuts = [0, *range(given.prompt, given.length + 1)]
    for a, b in pairwise(cuts):
        prompt = [a < given.prompt]
        moves = group.rows.plan(Counts([0], [b - a], prompt, prompt))
        group.begin(moves)
        tokens = [t[None][..., a:b, :] for t in given.tensors]
        outputs.append(attend(group, 0, layer_input(tokens), moves)[0])
        group.finish(moves)
    return torch.cat(outputs, dim=2), kept(group, 0)


def kept(group: SlotGroup, row: int) -> list[list[int]]:
    length = group.rows.lengths[row]
    return group.positions[0, row, :, :length].sort(dim=-1).values.tolist()


class Engine:
    """Plays vLLM: pages, and forwards of flat lists of tokens."""

    def __init__(self, terms: Terms):
        self.terms, policy = terms, terms.resolved()
        size = places(policy, geometry(terms))[1]
        self.planner = Planner(PAGES, None, torch.device("cpu"))
        # What earlier requests left must not be seen.
        pages = torch.full((PAGES, size), 7, dtype=torch.int8)
        self.slots = PagedSlots(
            pages, geometry(terms), policy, 0, Rope(None), self.planner.rows
        )  # fmt: skip
        self.told: dict[int, Told] = {}

    def tell(self, page: int, given: Sequence) -> None:
        self.told[page] = Told(given.prompt, self.terms.schedule(), 0)

    def forward(self, work: list[tuple[int, Sequence, int, int]]) -> list[Tensor]:
        """Tokens a to b of each (page, sequence, a, b); outputs [H, G, b - a, D] of each."""
        starts = [0]
        for _, _, a, b in work:
            starts.append(starts[-1] + b - a)
        parts = [
            PageTokens(page, start, b - a, a)
            for (page, _, a, b), start in zip(work, starts, strict=False)
        ]
        batches, fresh = self.planner.plan(parts, self.told)
        self.slots.begin_sequences(fresh)
        flat = [
            torch.cat([s.tensors[i][..., a:b, :] for _, s, a, b in work], dim=-2) for i in range(3)
        ]
        out = torch.zeros_like(flat[0])
        for batch in batches:
            given = [t[..., batch.take, :].movedim(-3, 0) for t in flat]
            self.slots.begin(batch.moves)
            done = attend(self.slots, 0, layer_input(given), batch.moves)
            out[..., batch.take, :] = done.movedim(0, -3)
        return [out[..., a:b, :] for a, b in pairwise(starts)]


@pytest.mark.parametrize("policy", ["streaming", "h2o", "beacon", "tova", "rkv", "full"])
def test_scattered_chunked_and_preempted_requests_are_what_they_are_alone(policy: str) -> None:
    terms = Terms(policy, "24", 2, 4, 80)
    one, two = sequence(1, 70, 50), sequence(2, 40, 9)
    engine, outputs = Engine(terms), {1: [], 2: []}

    def run(*work: tuple[int, Sequence, int, int]) -> None:
        for (_, given, _, _), out in zip(work, engine.forward(list(work)), strict=True):
            outputs[1 if given is one else 2].append(out)

    engine.tell(5, one)
    engine.tell(4, two)
    run((5, one, 0, 17), (4, two, 0, 9))  # a prompt in three pieces, beside a whole one
    run((4, two, 9, 10), (5, one, 17, 43))
    run((5, one, 43, 50), (4, two, 10, 11))
    for i in range(10):  # neighbours, in the other order
        run((5, one, 50 + i, 51 + i), (4, two, 11 + i, 12 + i))
    # Thrown out in the middle of its answer: another page takes all of it in again at once.
    engine.tell(8, one)
    outputs[1] = []
    run((4, two, 21, 22), (8, one, 0, 30))
    run((8, one, 30, 61), (4, two, 22, 23))
    for i in range(9):
        run((4, two, 23 + i, 24 + i), (8, one, 61 + i, 62 + i))
    for page, given, name in ((8, one, 1), (4, two, 2)):
        expected, positions = alone(terms, given.until(70 if name == 1 else 32))
        torch.testing.assert_close(torch.cat(outputs[name], dim=2), expected)
        assert kept(engine.slots, page) == positions
        assert max(engine.planner.rows.peak) <= (80 if policy == "full" else 24)


def test_a_page_holds_what_the_cache_holds() -> None:
    """Keys, values, positions, a score a slot, each from a multiple of 64 bytes on."""
    terms = Terms("h2o", "24", 2, 4, 80)
    found, size = places(terms.resolved(), geometry(terms))
    pairs, numbers = HEADS * 24 * DIM * 4, HEADS * 24 * 4
    assert [p.offset for p in found[:4]] == [0, pairs, 2 * pairs, 2 * pairs + numbers]
    assert [p.dtype for p in found[:3]] == [torch.float32, torch.float32, torch.int32]
    assert size % 64 == 0 and size >= 2 * pairs + 2 * numbers


def test_views_share_the_pages_memory() -> None:
    engine = Engine(Terms("beacon", "24", 2, 4, 80))
    group: Any = engine.slots
    storage = group.keys.untyped_storage().data_ptr()
    for tensor in (*group.stored, *group.state.values()):
        assert tensor.untyped_storage().data_ptr() == storage
        assert tensor.shape[:2] == (1, PAGES)


def test_tokens_that_do_not_follow_are_refused() -> None:
    engine = Engine(Terms("h2o", "24", 2, 4, 80))
    one = sequence(1, 20, 9)
    engine.tell(3, one)
    engine.forward([(3, one, 0, 9)])
    with pytest.raises(UserError, match="page 3 has seen 9 tokens, and is given number 11"):
        engine.forward([(3, one, 11, 12)])


def test_neighbouring_pages_that_decode_are_one_move() -> None:
    """Whatever the order in which vLLM lists them."""
    terms = Terms("h2o", "24", 2, 4, 80)
    planner, schedule = Planner(PAGES, None, torch.device("cpu")), terms.schedule()
    told = {page: Told(3, schedule, 0) for page in range(1, PAGES)}
    order = [5, 2, 8, 1, 7, 3, 6, 4]
    planner.plan([PageTokens(page, 3 * i, 3, 0) for i, page in enumerate(order)], told)
    batches, fresh = planner.plan([PageTokens(p, i, 1, 3) for i, p in enumerate(order)], told)
    assert len(batches) == len(batches[0].moves) == 1 and not fresh
    assert batches[0].take[:, 0].tolist() == [order.index(page) for page in range(1, PAGES)]
    assert batches[0].moves[0].rows == slice(1, PAGES)
