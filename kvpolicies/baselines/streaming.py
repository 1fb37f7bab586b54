"""streaming: StreamingLLM's sinks and newest tokens (arXiv 2309.17453)."""

from dataclasses import dataclass

from kvpolicies.options import option
from kvpolicies.policy import Policy, Scores, View


@dataclass(frozen=True, kw_only=True)
class Streaming(Policy):
    """Sinks and the newest tokens. Score = position.

    `positions="original"` keeps each key's own rotation; `"cache"` is the paper's: keys are kept
    before RoPE and rotated at each step to their rank in the cache, the query too. Eviction
    times do not tell the latter's positions, so it has no replay.

    Raises:
        UserError: for a value that an option cannot have.
    """

    name = "streaming"
    source = "StreamingLLM, arXiv 2309.17453"
    layers_alike = True
    positions: str = option("original", choices=("original", "cache"))
    """`original`: keys keep their rotation; `cache`: they get that of their rank in the cache."""

    @property
    def rerotates(self) -> bool:  # type: ignore[override]
        """Keys are stored before RoPE under `positions="cache"`."""
        return self.positions == "cache"

    def scores(self, view: View) -> Scores:
        """The position itself (exact in float32 up to 2^24 tokens)."""
        return view.positions.float()
