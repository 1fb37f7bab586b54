"""Where a deployment leaves what its studies measured, so that their accuracies may not hold.

What is said is computed here; cautions.j2 has the words.
"""

from pathlib import Path
from typing import Any

from kvpolicies.eval.display.pages import macros
from kvpolicies.eval.select.benches import Bench
from kvpolicies.eval.select.candidates import Candidate
from kvpolicies.eval.select.evidence import Evidence
from kvpolicies.eval.select.sources import StudyFolder
from kvpolicies.eval.study import asked
from kvpolicies.models.memory import Load

NOTABLE = 0.01
"""A share of samples worth a word."""
_SAID = Path(__file__).with_name("cautions.j2")


def cautions(evidence: Evidence, winner: Candidate, load: Load, config: Any) -> list[str]:
    """One sentence a way in which the deployment of `winner` is not what was measured.

    Args:
        config: of the model, as transformers has it.
    """
    say = macros(_SAID)
    said = [caution for source in evidence.sources for caution in _asked(source)]
    for bench in evidence.benches:
        said += _cut_off(bench, winner) + _lengths(bench, winner, load) + _slots(bench, winner)
    if load.prompt > evidence.prompt_tokens > 0:
        said.append(say.long_prompts(load.prompt, evidence.prompt_tokens))
    most = getattr(config, "max_position_embeddings", None)
    if most and load.prompt + load.new > most:
        said.append(say.positions(load.prompt + load.new, most))
    return said


def _asked(source: StudyFolder) -> list[str]:
    if source.told is None:
        return [macros(_SAID).unknown_form(source.folder)]
    return [f"{source.study.task}: {one.removesuffix('.')}" for one in asked.cautions(source.told)]


def _cut_off(bench: Bench, winner: Candidate) -> list[str]:
    """Says how often full, which losses are against, and the winner were cut off."""
    cells = {"full": bench.full, winner.label: bench.cells[winner.cell]}
    shares = {label: float(cell.cut.mean()) for label, cell in cells.items()}
    say = macros(_SAID)
    return [say.cut_off(share, label, bench) for label, share in shares.items() if share >= NOTABLE]


def _lengths(bench: Bench, winner: Candidate, load: Load) -> list[str]:
    say = macros(_SAID)
    if load.new > bench.limit:
        return [say.longer(load.new, bench, winner.is_full)]
    cut = float((bench.cells[winner.cell].lengths > load.new).mean())
    return [say.shorter(cut, winner.label, bench, load.new)] if cut >= NOTABLE else []


def _slots(bench: Bench, winner: Candidate) -> list[str]:
    if winner.is_full:
        return []
    said, mine, say = [], bench.cells[winner.cell], macros(_SAID)
    low, high = int(mine.slots.min()), int(mine.slots.max())
    slots = int(winner.budget.partition(":")[0])
    if "%" in winner.cell.budget and not low <= slots <= high:
        said.append(say.other_slots(winner.cell.budget, low, high, bench, slots))
    idle = float((mine.prompts + mine.lengths <= mine.slots).mean())
    return said + ([say.idle(idle, winner.label, bench)] if idle >= 0.5 else [])
