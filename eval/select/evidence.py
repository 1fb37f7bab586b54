"""What finished studies say about every policy at every budget, task by task.

Folders of the same task on the same problems are one bench: the policies of both meet there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvpolicies.eval.select.benches import Bench, read_bench
from kvpolicies.eval.select.sources import StudyFolder, check_alike, check_same_bench, read_source
from kvpolicies.eval.study import lookahead
from kvpolicies.eval.study.config import Cell, Study


@dataclass(frozen=True)
class Evidence:
    """All benches, and which cells were measured on each of them."""

    sources: tuple[StudyFolder, ...]
    benches: tuple[Bench, ...]
    cells: tuple[Cell, ...]
    """The candidates: full first."""
    left_out: dict[Cell, str]
    """Cells that are none, and why."""

    @property
    def study(self) -> Study:
        """The first study: model, sampling and dtype are the same in all."""
        return self.sources[0].study

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt measured; 0 where no row says."""
        return max(int(bench.full.prompts.max()) for bench in self.benches)


def read(folders: Sequence[str], model: str | None) -> Evidence:
    """The evidence in `folders`, of `model` (default: whichever they share).

    Raises:
        UserError: no study there, an unfinished one, one that grades no answers or charges state
            to the budget, another model, or folders that no deployment can be chosen from together.
    """
    sources = [read_source(Path(folder)) for folder in dict.fromkeys(folders)]
    check_alike(sources, model)
    benches: dict[str, Bench] = {}
    for source in sources:
        key = f"{source.study.task} {source.fingerprint}"
        mine = read_bench(source)
        if key in benches:
            check_same_bench(source, next(s for s in sources if s.fingerprint in key))
            mine = replace(mine, cells={**mine.cells, **benches[key].cells})
        benches[key] = mine
    return _assembled(sources, _labelled(list(benches.values())))


def _assembled(sources: list[StudyFolder], benches: list[Bench]) -> Evidence:
    seen = dict.fromkeys(cell for bench in benches for cell in bench.cells)
    left_out = {}
    for cell in seen:
        absent = [bench.label for bench in benches if cell not in bench.cells]
        if lookahead.mode(cell.policy, forced=False):
            left_out[cell] = "is told what is to come: no policy to deploy"
        elif absent:
            left_out[cell] = f"was not measured on {', '.join(absent)}"
    chosen = tuple(cell for cell in seen if cell not in left_out)
    return Evidence(tuple(sources), tuple(benches), chosen, left_out)


def _labelled(benches: list[Bench]) -> list[Bench]:
    """Labels made unique: the second bench of a task is called `ledger 2`."""
    counts: dict[str, int] = {}
    found = []
    for bench in benches:
        counts[bench.label] = number = counts.get(bench.label, 0) + 1
        found.append(replace(bench, label=bench.label + (f" {number}" if number > 1 else "")))
    return found
