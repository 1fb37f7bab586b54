"""vLLM's attention backend: a page a request and layer, whose slots kvpolicies fills and evicts."""

# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheLayout,
)

from kvpolicies.errors import UserError
from kvpolicies.kernels.logit_transform import LogitTransform
from kvpolicies.step import LayerInput, attend
from kvpolicies.vllm.pages import PagedSlots, places
from kvpolicies.vllm.planning import Batch, PageTokens
from kvpolicies.vllm.session import current


class SlotBackend(AttentionBackend):
    """What vLLM asks before anything runs: what fits, and how large a page is."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True
    groups: ClassVar[int] = 1
    """Query heads a KV head, which `customize_spec` is not told: the layers before it tell."""

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's table of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["SlotAttention"]:
        """Who attends."""
        return SlotAttention

    @staticmethod
    def get_builder_cls() -> type["SlotPlanBuilder"]:
        """Who plans a forward."""
        return SlotPlanBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        """Any: a block is a page."""
        return [MultipleOf(1)]

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned sinks are part of the logit transform."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple:
        """Layer by layer, page by page."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Counts are the host's."""
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """One page a request for its whole life, of as many bytes as a row and layer take.

        Raises:
            UserError: for a layer that is no plain attention layer.
        """
        if type(spec) is not FullAttentionSpec:
            raise UserError(f"kvpolicies inside vLLM: {type(spec).__name__}: full attention only")
        session = current()
        geometry = session.geometry(spec.num_kv_heads, cls.groups, spec.head_size, spec.dtype)
        _, size = places(session.policy, geometry)
        # The page's tokens: beyond any position, for vLLM computes a slot mapping (position //
        # block_size into a table of one block a row) even where none is used.
        tokens = -(-session.terms.max_length // spec.block_size) * spec.block_size
        return CircularBufferSpec(
            block_size=tokens, tokens_per_state=tokens, num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size, dtype=torch.int8, num_head_slots=1,
            state_content_bytes=size, dcp_sharded=False,
        )  # fmt: skip


@dataclass
class SlotPlan(AttentionMetadata):
    """A forward's batches, and the pages that begin a sequence."""

    batches: list[Batch]
    fresh: list[int]


class SlotPlanBuilder(AttentionMetadataBuilder[SlotPlan]):
    """Plans each forward once, for all layers."""

    _cudagraph_support = AttentionCGSupport.NEVER  # plans are the host's: graphs are piecewise

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SlotPlan:
        """The plan of a forward; what it brings counts from here on."""
        given, session = common_attn_metadata, current()
        starts = given.query_start_loc_cpu.tolist()
        lengths = given.seq_lens_cpu_upper_bound  # exact without speculative decoding
        lengths = (given.seq_lens if lengths is None else lengths).tolist()
        pages = given.block_table_tensor[:, 0].tolist()
        parts = [
            PageTokens(pages[i], starts[i], n, lengths[i] - n)
            for i in range(given.num_reqs)
            if (n := starts[i + 1] - starts[i])
        ]
        assert session.planner is not None
        return SlotPlan(*session.planner.plan(parts, session.told))


class SlotAttention(AttentionImpl[SlotPlan]):
    """One layer: our step on views into its pages."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **_: Any,
    ):
        current()  # refuses a vLLM that was started without our worker
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.cap, self.sinks = kv_cache_dtype, logits_soft_cap, sinks
        self.groups = SlotBackend.groups = self.num_heads // self.num_kv_heads
        odd = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "keys shared between layers": kv_sharing_target_layer_name,
            f"{attn_type} attention": None if attn_type == "decoder" else attn_type,
        }
        for name, given in odd.items():
            if given is not None:
                raise UserError(f"kvpolicies inside vLLM: {name} is not served")
        self.dtype = get_current_vllm_config().model_config.dtype
        self.slots: PagedSlots | None = None

    def bind(self, layer: int, kv_cache: Tensor) -> PagedSlots:
        """The layer's slots in its pages, [P, ..., bytes] int8, once vLLM has allocated them."""
        session, pages = current(), kv_cache.flatten(1)
        assert pages.data_ptr() == kv_cache.data_ptr(), "a page's bytes lie together"
        geometry = session.geometry(self.num_kv_heads, self.groups, self.head_size, self.dtype)
        rope = session.ropes[layer]
        if session.policy.needs_rope:
            rope.prepare(session.terms.max_length, kv_cache.device)
        planner = session.planning(geometry, kv_cache.device)
        self.slots = PagedSlots(pages, geometry, session.policy, layer, rope, planner.rows)
        return self.slots

    @torch.no_grad()
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: SlotPlan | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Takes a forward's tokens into the layer's pages and attends.

        Args:
            query, output: [N, HG, D]. key, value: [N, H, D]. kv_cache: [P, ..., bytes].
        """
        if attn_metadata is None:  # vLLM measures its memory
            return output.zero_()
        slots, heads = self.slots, self.num_kv_heads
        assert slots is not None
        hidden = current().hidden.pop(slots.layers[0], None)
        softmax = LogitTransform(
            self.scale, self.cap or None, None if self.sinks is None else self.sinks.view(heads, -1)
        )
        slots.begin_sequences(attn_metadata.fresh)
        queries = query.view(-1, heads, self.groups, self.head_size)
        keys, values = (x.view(-1, heads, self.head_size) for x in (key, value))
        out = output.view(-1, self.num_heads, self.head_size)
        for batch in attn_metadata.batches:
            take = batch.take
            given = LayerInput(
                queries[take].permute(0, 2, 3, 1, 4),
                keys[take].transpose(1, 2),
                values[take].transpose(1, 2),
                None if hidden is None else hidden[take],
                softmax,
            )
            slots.begin(batch.moves)
            attended = attend(slots, 0, given, batch.moves)  # [A, H, G, T, D]
            out[take] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return output


def layer_number(name: str) -> int:
    """The number in the model of a layer that vLLM calls "model.layers.3.self_attn.attn"."""
    return extract_layer_index(name)
