"""Whose turn it is: units of a study handed out to as many processes as there are.

Each process goes through the units in order and works on those that it can claim and that miss
rows. When nothing is left to claim it waits: a unit whose process dies is free at once, and is
taken over. Nothing is planned beforehand, so that processes may be of any number and speed, come
late or go early, and never work on the same unit.
"""

import time
from collections.abc import Iterator, Sequence

from kvpolicies.eval.study import locks as claims
from kvpolicies.eval.study.progress import Bars
from kvpolicies.eval.study.results import Key, Results


def turns(results: Results, units: Sequence[Sequence[Key]], bars: Bars) -> Iterator[int]:
    """Indices of units, each claimed until the next is asked for; ends when no row is missing.

    Args:
        units: the keys of each unit's rows.
    """
    while waiting := [i for i, unit in enumerate(units) if not _done(results, unit)]:
        bars.units_done(len(units) - len(waiting))
        idle = True
        for index in waiting:
            if not results.claims.take(claims.unit(index)):
                continue
            try:
                bars.rows(results.refresh())
                if not _done(results, units[index]):
                    idle = False
                    yield index
            finally:
                results.claims.release(claims.unit(index))
        if idle:
            time.sleep(claims.WAIT)
        bars.rows(results.refresh())
    bars.units_done(len(units))


def _done(results: Results, unit: Sequence[Key]) -> bool:
    return all(key in results for key in unit)
