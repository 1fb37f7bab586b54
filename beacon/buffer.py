"""BeaconKV's query buffer: beacons kept by continual farthest-point sampling, then recent queries.

Per query head, entries [0, count) are filled: in the *early* phase a mix that FPS thins out again
and again; from the moment the cache is n_recent slots short of full (*late*) entries [0, beacons)
are fixed, and the queries behind them are the recents, kept apart. So the recents of an eviction
are the n_recent newest queries: where it frees fewer slots than that, those that will still be
among the newest at the next one stay apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicies.beacon.query_memory import ObservationQueries, QueryMemory
from kvpolicies.beacon.space import taken
from kvpolicies.kernels.fps import farthest_points
from kvpolicies.policy import Observation, View
from kvpolicies.transfer import on_device


@dataclass(frozen=True)
class QueryBuffer(QueryMemory):
    """How a row's buffer is filled and thinned; its counters are `count`, `beacons` and `late`.

    `selector` is `continual`, or `initial`, which keeps the first queries instead.
    """

    def add(self, view: View, step: Observation) -> None:
        """Takes in a step's n queries of every row."""
        n = step.positions.shape[1]
        early = [
            min(n, max(0, s.capacity - self.n_recent - (length - n)))
            for s, length in zip(view.schedules, view.lengths, strict=True)
        ]
        if n == 1:
            self._add_one(view, step, early)
        else:
            for row, k in enumerate(early):
                self._add_prompt(view, step, row, k)
            self._fix_beacons(view)  # of all rows, once all of them have taken their queries

    def looking(self, view: View) -> ObservationQueries:
        """Whatever the buffer holds: the fixed beacons, and the recents behind them."""
        marks, when = counters(view), view.state["when"]
        place = torch.arange(self.size, device=when.device)
        count, beacons = (
            on_device([c[k] for c in marks], when.device)[:, None] for k in ("count", "beacons")
        )
        is_beacon = place < beacons  # [B, N]
        own = when[:, 0, 0] - 1  # recents came together: one position for all heads
        positions = torch.where(is_beacon, view.newest[:, None], own)
        most = max(c["beacons"] for c in marks)  # behind them, no row has any
        queries = view.state["queries"].float()
        held, late = queries[:, :, :, :most], queries[:, :, :, most:]
        raw = self.space.raw(view.rope, held, when[:, :, :, :most])
        moved = self.space.looking_from(view.rope, raw, positions[:, :most].clamp_min(0))
        moved = torch.where(is_beacon[:, None, None, :most, None], moved, held)
        queries = torch.cat([moved, late], dim=3)
        return ObservationQueries(queries, positions, place < count)

    def thin(self, view: View, rows: list[int], keep: int) -> None:
        """Thins the buffers of `rows` down to `keep` queries where they hold more."""
        alike: dict[int, list[int]] = {}
        for row in rows:
            alike.setdefault(counters(view)[row]["count"], []).append(row)
        for count, members in alike.items():
            if count > keep:  # rows of one count are one call; the copy is small
                here = on_device(members, view.keys.device)
                queries, when = (view.state[k][here, :, :, :count] for k in ("queries", "when"))
                self._store(view, members, *self._chosen(view, queries, when, keep))

    def after_eviction(self, view: View) -> None:
        """Beacons and recents together go back to n_beacon, final if little room is left.

        But for the recents that the next eviction still finds among the newest.
        """
        alike: dict[tuple[int, int], list[int]] = {}
        for row, (c, s) in enumerate(zip(counters(view), view.schedules, strict=True)):
            room = s.capacity - view.lengths[row]
            stay = max(0, min(c["count"] - c["beacons"], self.n_recent - room))
            alike.setdefault((c["count"] - stay, stay), []).append(row)
        for (n, stay), rows in alike.items():  # rows of the same counts are one call
            here = on_device(rows, view.keys.device)
            queries, when = (view.state[k][here, :, :, : n + stay] for k in ("queries", "when"))
            beacons = self._chosen(view, queries[:, :, :, :n], when[:, :, :, :n], self.n_beacon)
            pairs = zip(beacons, (queries, when), strict=True)
            self._store(view, rows, *(torch.cat([x, y[:, :, :, n:]], dim=3) for x, y in pairs))
            for row in rows:
                fixed = beacons[0].shape[3] if stay else 0
                view.counters[row].update(late=int(stay > 0), beacons=fixed)
        self._fix_beacons(view)

    def _add_one(self, view: View, step: Observation, early: list[int]) -> None:
        """Decode: one query a row, all rows in one write."""
        marks = counters(view)
        queries, when = view.state["queries"], view.state["when"]
        place = on_device([c["count"] for c in marks], when.device)[:, None, None, None]
        new = step.queries.to(queries.dtype)
        queries.scatter_(3, place[..., None].expand(new.shape), new)
        now = (step.positions + 1).to(when.dtype)[:, None, None]
        place, now = (x.expand(new.shape[:-1]) for x in (place, now))
        when.scatter_(3, place, now)
        for c, k in zip(marks, early, strict=True):
            if not (k or c["late"]):
                c.update(late=1, beacons=c["count"])
            c["count"] += 1
        full = [i for i, c in enumerate(marks) if early[i] and c["count"] == self.size]
        self.thin(view, full, self.n_beacon)
        self._fix_beacons(view)

    def _add_prompt(self, view: View, step: Observation, row: int, k: int) -> None:
        """Prefill: n queries of one row; the first k may become beacons, the others are recents."""
        here = slice(row, row + 1)
        c = counters(view)[row]
        queries = step.queries[here].to(view.state["queries"].dtype)
        when = (step.positions[here, None, None] + 1).to(torch.int32).expand(queries.shape[:-1])
        if k:
            held = [view.state[name][here, :, :, : c["count"]] for name in ("queries", "when")]
            pool = torch.cat([held[0], queries[:, :, :, :k]], dim=3)
            pool_when = torch.cat([held[1], when[:, :, :, :k]], dim=3)
            self._store(view, [row], *self._chosen(view, pool, pool_when, self.n_beacon))
        if k < queries.shape[3]:
            c["late"], c["beacons"] = 1, c["beacons"] if c["late"] else c["count"]
            places = slice(c["count"], c["count"] + queries.shape[3] - k)
            view.state["queries"][here, :, :, places] = queries[:, :, :, k:]
            view.state["when"][here, :, :, places] = when[:, :, :, k:]
            c["count"] = places.stop

    def _fix_beacons(self, view: View) -> None:
        """Rows whose cache is within n_recent slots of full: what the buffer holds is final."""
        reached = [
            i
            for i, (c, s) in enumerate(zip(counters(view), view.schedules, strict=True))
            if not c["late"] and view.lengths[i] >= s.capacity - self.n_recent
        ]
        self.thin(view, reached, self.n_beacon)
        for i in reached:
            c = view.counters[i]
            c["late"], c["beacons"] = 1, c["count"]

    def _chosen(
        self, view: View, queries: Tensor, when: Tensor, keep: int
    ) -> tuple[Tensor, Tensor]:
        """The selector's choice of at most `keep` of the given queries, in its order."""
        if queries.shape[3] <= keep:
            return queries, when
        if self.selector == "initial" or keep == 0:
            return queries[:, :, :, :keep], when[:, :, :, :keep]
        index = farthest_points(self.space.points(self.space.raw(view.rope, queries, when)), keep)
        return taken(queries, index), taken(when, index)

    def _store(self, view: View, rows: list[int], queries: Tensor, when: Tensor) -> None:
        count = queries.shape[3]
        here = on_device(rows, queries.device)
        view.state["queries"][here, :, :, :count] = queries
        view.state["when"][here, :, :, :count] = when
        for row in rows:
            view.counters[row]["count"] = count


def counters(view: View) -> list[dict[str, int]]:
    """The rows' counters, zero for a sequence that begins."""
    for c in view.counters:
        if not c:
            c.update(count=0, beacons=0, late=0)
    return view.counters
