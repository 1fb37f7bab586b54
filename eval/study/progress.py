"""Progress bars of a study, on stderr: cells, and samples within all of them."""

import sys

from tqdm import tqdm


class Bars:
    """Two bars, of which only the leading rank shows any; others' rows count as they come in."""

    def __init__(self, units: int, cells: int, samples: int, *, shown: bool) -> None:
        often = 0.2 if sys.stderr.isatty() else 20.0  # a log file gets a line now and then
        self._a_unit = cells
        self._cells = tqdm(total=units * cells, desc="cells", mininterval=often, disable=not shown)
        self._samples = tqdm(
            total=samples, desc="samples", mininterval=often, position=1, leave=False,
            disable=not shown,
        )  # fmt: skip

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *exc: object) -> None:
        self._samples.close()
        self._cells.close()

    def rows(self, count: int) -> None:
        """So many samples more are done."""
        self._samples.update(count)

    def cell(self, policy: str, budget: str) -> None:
        """The cell that is worked on from now."""
        self._cells.set_postfix_str(f"{policy} @ {budget}", refresh=False)

    def cell_done(self) -> None:
        """That cell is done."""
        self._cells.update()

    def units_done(self, count: int) -> None:
        """So many units are complete, whoever completed them."""
        self._cells.update(count * self._a_unit - self._cells.n)
