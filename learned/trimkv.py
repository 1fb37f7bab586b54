"""trimkv: every token is forgotten at a rate of its own (TRIM-KV)."""

from dataclasses import dataclass

from kvpolicies.learned.policy import Learned
from kvpolicies.options import option
from kvpolicies.policy import Scores, View


@dataclass(frozen=True, kw_only=True)
class TrimKV(Learned):
    """A retention gate beta on the attention's input; score = age of the token times log beta."""

    name = "trimkv"
    source = "TRIM-KV, arXiv 2512.03324"
    needs_input = True
    every: int = option(128, least=1)

    def scores(self, view: View) -> Scores:
        """(t - i) log beta_i, t the newest token's position."""
        age = view.newest[:, None, None] - view.positions
        return age * view.slot_state["score"]
