"""The order of an epoch of a mixture: which data set gives the row at a position, and which of its rows.

::

    data sets   web   0 … 63 │ 64 … 127 │ …         each in its own shuffled order, one epoch after the other,
                code  0 … 63 │ 64 … 127 │ …         cut into groups of 64 rows, one row of each lane (see
                                                    pipeline/reader/src/order.rs)
    stretches   128 groups; each data set has its share of them, up to rounding
    lanes       each lane takes the 128 groups in turn, evenly mixed, and begins at a group of its own

      position  0     1     2     …  63   │ 64    65   …
      lane      0     1     2        63   │ 0     1
      group     web₁  code₀ web₄     web₀ │ code₀ web₂

A row stays in its lane, so a rank of W reads only the blocks of its lanes, as in one data set. (This holds where W
divides 64 and no data set ends its epoch within the stretch.) The number of a stretch determines its rows: no order is
kept in memory, and a resumed run replays none.

Before any position, the rows of a data set differ from its share by less than 64 · (2 + log2 of the number of data
sets). At the end of the epoch the counts are exact. Every choice is Philox of (seed, "mixture_lanes", stretch, epoch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..views.keyed import epoch_seed, integers, unit

LANES = 64
TURNS = 128
"""Groups of a stretch."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Quota:
    """The rows that one data set gives to an epoch: places ``begin`` to ``end`` of its own epochs, joined.

    Each of these has ``rows`` rows.
    """

    begin: int
    end: int
    rows: int

    @property
    def _groups_of_epoch(self) -> int:
        return -(-self.rows // LANES)

    def _group_of(self, place: int) -> int:
        epoch, position = divmod(place, self.rows)
        return epoch * self._groups_of_epoch + position // LANES

    @property
    def groups(self) -> int:
        """Groups of the quota. The first, the last and those at the end of an own epoch may have fewer than 64 rows."""
        return self._group_of(self.end - 1) - self._group_of(self.begin) + 1

    def first_place(self, group: int) -> int:
        """The first place of a group that lies within the quota."""
        epoch, turn = divmod(self._group_of(self.begin) + group, self._groups_of_epoch)
        return min(max(epoch * self.rows + turn * LANES, self.begin), self.end)

    def places(self, low: int, high: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Places of the rows of groups low to high, [groups, lanes], and which of them exist."""
        epoch, turn = np.divmod(self._group_of(self.begin) + np.arange(low, high), self._groups_of_epoch)
        position = turn[:, None] * LANES + np.arange(LANES)
        places = epoch[:, None] * self.rows + position
        return places, (position < self.rows) & (places >= self.begin) & (places < self.end)


class Interleave:
    """One epoch of a mixture with these quotas."""

    def __init__(self, quotas: Sequence[Quota], epoch: int, seed: int | None) -> None:
        self.quotas = quotas
        self._seed = None if seed is None else epoch_seed(seed, epoch)
        self._groups = [quota.groups for quota in quotas]
        self.stretches = -(-sum(self._groups) // TURNS)

    def begin(self, stretch: int) -> int:
        """The first position of a stretch; for the number after the last stretch, the length of the epoch."""
        groups = self.groups_before(stretch)
        return sum(quota.first_place(group) - quota.begin for quota, group in zip(self.quotas, groups))

    def find(self, position: int) -> int:
        """The stretch that holds a position."""
        low, high = 0, self.stretches
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.begin(middle) <= position else (low, middle)
        return low

    def groups_before(self, stretch: int) -> list[int]:
        """How many groups of each quota come before a stretch.

        The two halves of the list divide the groups by their sizes, rounded; each half divides its part in the same
        way. The counts never fall from one stretch to the next, and each of the log2(quotas) roundings moves at most
        half a group.
        """
        return _divided(min(stretch * TURNS, sum(self._groups)), self._groups)

    def stretch(self, stretch: int) -> tuple[Ints, Ints]:
        """Number of the quota, and place in it, for each position of a stretch: [n] each."""
        low, high = self.groups_before(stretch), self.groups_before(stretch + 1)
        if self._seed is None:
            bounds = [(quota.first_place(a), quota.first_place(b)) for quota, a, b in zip(self.quotas, low, high)]
            sources, turns = _evenly([end - begin for begin, end in bounds])
            return sources, np.asarray([begin for begin, _ in bounds])[sources] + turns
        sources, turns = _evenly([b - a for a, b in zip(low, high)])
        tables = [quota.places(a, b) for quota, a, b in zip(self.quotas, low, high)]
        first = np.cumsum([0] + [b - a for a, b in zip(low, high)])[sources] + turns
        places, there = (np.concatenate(part)[first] for part in zip(*tables))
        # each lane begins in another 64th of the turns, so that any 64 positions are mixed as well
        lanes = np.arange(LANES)
        random = integers(self._seed, "mixture_lanes", np.asarray([stretch], np.uint64), 2 * LANES)[0]
        part = np.argsort(random[:LANES], kind="stable") + unit(random[LANES:])
        begins = (part * (len(sources) / LANES)).astype(np.int64)
        turn = (np.arange(len(sources))[:, None] + begins) % len(sources)
        chosen = there[turn, lanes]
        return np.broadcast_to(sources[turn], turn.shape)[chosen], places[turn, lanes][chosen]


def _divided(count: int, sizes: Sequence[int]) -> list[int]:
    """A count divided in proportion to sizes. Each part is 0 to its size if the count is at most their sum."""
    if len(sizes) == 1:
        return [count]
    half = len(sizes) // 2
    left, right = sum(sizes[:half]), sum(sizes[half:])
    given = (2 * count * left + left + right) // (2 * (left + right))
    return _divided(given, sizes[:half]) + _divided(count - given, sizes[half:])


def _evenly(counts: Sequence[int]) -> tuple[Ints, Ints]:
    """The turns of several sources, spread evenly: the source of each turn, and its number for that source."""
    sources = np.repeat(np.arange(len(counts)), counts)
    turns = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((turns + 0.5) / np.asarray(counts)[sources], kind="stable")
    return sources[order], turns[order]


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """An integer divided in proportion to weights by Hamilton's method: each part is within 1 of its share, ties to the first."""
    whole = math.fsum(weights)
    exact = [total * weight / whole for weight in weights]
    given = [math.floor(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (given[i] - exact[i], i))
    for i in order[: total - sum(given)]:
        given[i] += 1
    return given
