"""A fixed budget inside vLLM: our step, unchanged, on pages that vLLM owns and schedules.

    kvpolicies vllm deploy.yaml        # launcher.py writes vLLM's arguments and starts its server

vLLM gives each request one page a layer for its whole life (backend.py); keys, values, positions
and the policy's state are views into it (pages.py). A forward is planned once for all layers
(planning.py). worker.py tells which request lies in which page, session.py holds what all of these
share in a worker's process, and what cannot work is refused by name (refusals.py).

Nothing here but backend.py, worker.py and door.py imports vLLM.
"""


def register() -> None:
    """vLLM calls this in each of its processes (entry point `vllm.general_plugins`).

    It makes `--attention-backend CUSTOM` ours. Whoever runs vLLM without that sees no difference.
    """
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    register_backend(AttentionBackendEnum.CUSTOM, "kvpolicies.vllm.backend.SlotBackend")
