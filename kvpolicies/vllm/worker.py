"""vLLM's worker, which also notes which request lies in which page: --worker-cls of the launcher.

An attention backend sees pages and counts. Where a prompt ends, and what a request asks for, only
the scheduler's output tells.
"""

# pyright: reportMissingImports=false

from typing import Any

from torch import Tensor, nn
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvpolicies.vllm import session
from kvpolicies.vllm.backend import SlotAttention, layer_number

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base

    # Its platform knows no other name; it is asked in the worker, so other servers keep theirs.
    register_backend(AttentionBackendEnum.CPU_ATTN, "kvpolicies.vllm.backend.SlotBackend")
else:
    from vllm.v1.worker.gpu_worker import Worker as Base


class SlotWorker(Base):
    """A worker whose layers keep a fixed budget."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        super().__init__(vllm_config, *args, **kwargs)
        size = vllm_config.parallel_config.tensor_parallel_size
        self.session = session.start(vllm_config, self.rank % size)
        self._requests: dict[str, Any] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Also keeps what each attention block is given, where the policy reads it."""
        super().load_model(*args, **kwargs)
        if not self.session.policy.needs_input:
            return
        model = self.model_runner.get_model()
        for name in self._layers():
            block = model.get_submodule(name.rpartition(".")[0])
            block.register_forward_pre_hook(self._keeper(layer_number(name)), with_kwargs=True)

    def _keeper(self, layer: int) -> Any:
        def keep(_: nn.Module, args: tuple, kwargs: dict[str, Tensor]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
            self.session.hidden[layer] = hidden

        return keep

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocates the pages, and gives each layer its own."""
        super().initialize_from_config(kv_cache_config)
        self.session.pages = kv_cache_config.num_blocks
        for name, layer in self._layers().items():
            layer.impl.bind(layer_number(name), layer.kv_cache)

    def _layers(self) -> dict[str, Any]:
        context = self.vllm_config.compilation_config.static_forward_context
        return {
            n: m for n, m in context.items() if isinstance(getattr(m, "impl", None), SlotAttention)
        }

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes new requests, and those that come back with another page, before they run."""
        for gone in scheduler_output.finished_req_ids:
            self._requests.pop(gone, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._requests[new.req_id] = new
            self._tell(new.req_id, new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for name, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if pages and pages[0]:
                self._tell(name, pages)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _tell(self, name: str, pages: tuple[list[int], ...]) -> None:
        request = self._requests[name]
        sampling = request.sampling_params
        asked = (sampling.extra_args if sampling else None) or {}
        self.session.tell(pages[0][0], len(request.prompt_token_ids), asked)
