"""What all traces of an analysis share, and whether they can be run at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicies.admission import asked_for, scheduled_layers
from kvpolicies.architecture import inspect_model, rotates_by_halves
from kvpolicies.errors import UserError
from kvpolicies.eval.revisit.config import Revisit
from kvpolicies.eval.revisit.traces import Trace
from kvpolicies.positions import check_positions
from kvpolicies.registry import resolve
from kvpolicies.rope import Rope


@dataclass(frozen=True)
class Setting:
    """What the traces of a run share."""

    config: Revisit
    model: Any
    tokenizer: Any
    ropes: list[Rope]

    @property
    def cells(self) -> list[tuple[str, str]]:
        """(policy, budget), in order."""
        return [(p, b) for p in self.config.policies for b in self.config.budgets]


def check(analysis: Setting, traces: Sequence[Trace]) -> None:
    """Raises UserError if a trace, a policy or a budget cannot be run on the model."""
    config, model = analysis.config, analysis.model
    shape = inspect_model(model)
    if None not in shape.spans:
        raise UserError(f"model {config.model}: every layer has a sliding window: nothing is far")
    if not rotates_by_halves(model):
        raise UserError(f"model {config.model}: its rotary position embedding is unknown here")
    if config.head is not None:
        layer, head = map(int, config.head.split("."))
        full = [i for i, span in enumerate(shape.spans) if span is None]
        if layer not in full or head >= shape.heads * shape.groups:
            raise UserError(
                f"revisit: no query head {config.head}: layers that see all are {full}, each of "
                f"{shape.heads * shape.groups} query heads"
            )
    for policy in map(resolve, config.policies):
        inspect_model(model, policy)
    for trace in traces:
        check_positions(model, len(trace.tokens), what=f"trace {trace.id!r}")
        for policy, budget in analysis.cells:
            try:
                length = len(trace.prompt) + len(trace.new)
                own = asked_for(resolve(policy), budget, length, length)
                prompt, new = len(trace.prompt), len(trace.new)
                scheduled_layers(resolve(policy), own, prompt, new, shape.evicted)
            except UserError as error:
                raise UserError(f"budget {budget} of trace {trace.id!r}: {error}") from None
    for rope in analysis.ropes:  # what cannot be rotated so far is refused now
        rope.prepare(max(len(t.tokens) for t in traces), model.device)
