"""The application of `kvpolicies serve` in this process, over the embedded model."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from kvpolicies.models import embedded
from kvpolicies.models.form import Form
from kvpolicies.sampling import Sampling
from kvpolicies.serve.app import Served, make_app
from kvpolicies.serve.guard import Access
from kvpolicies.serve.metrics import Metrics
from kvpolicies.serve.prompts import Encoder, Lengths
from kvpolicies.serve.service import Service
from kvpolicies.serving import Engine, serving

LENGTH = 200


@contextmanager
def engine(rows: int = 2) -> Iterator[tuple[Engine, Any]]:
    """(an engine of 48 slots under `streaming`, its tokenizer)."""
    model, tokenizer = embedded.load()
    with serving(model, "streaming", 48, rows=rows, max_length=LENGTH) as made:
        yield made, tokenizer


@asynccontextmanager
async def app(
    made: Engine,
    tokenizer: Any,
    *,
    access: Access | None = None,
    waiting: int = 4,
    lengths: Lengths | None = None,
) -> AsyncIterator[tuple[Any, Served]]:
    """(the application, what it serves), running until the block ends."""
    words = made.loop.model.get_input_embeddings().weight.shape[0]
    served = Served(
        service=Service(made, Metrics(), waiting),
        encoder=Encoder(tokenizer, words, lengths or Lengths(LENGTH, 100), Form()),
        access=access or Access(),
        model="embedded",
        policy=str(made.policy),
        sampling=Sampling(),
        max_body=1 << 20,
    )  # fmt: skip
    try:
        yield make_app(served), served
    finally:
        await served.service.stop(0, asyncio.Event())
        served.encoder.close()
        assert served.service.join(60)
