"""The order of an epoch of a mixture: which data set gives the row at a position, and which of its rows.

::

    data sets   web   0 … 63 │ 64 … 127 │ …         each in its own shuffled order, its epochs laid end to end,
                code  0 … 63 │ 64 … 127 │ …         cut into groups of 64 rows: one row of each lane (pipeline/reader/src/order.rs)
    stretches   128 groups, of each data set as many as its share asks for, up to what a rounding moves
    lanes       each lane takes the 128 groups in turn, evenly mixed, and begins at a place of its own

      position  0     1     2     …  63   │ 64    65   …
      lane      0     1     2        63   │ 0     1
      group     web₁  code₀ web₄     web₀ │ code₀ web₂

A row stays in its lane, so a rank of W meets the blocks of its lanes alone, as it does in one data set (where W divides 64, and as long
as no data set comes to the end of its epoch within the stretch). A stretch is found from its number alone: no order is kept in memory, and none is
replayed to resume. Of any data set, the rows given out before any position differ from its share of them by less than 64 · (2 + log2 of
the number of data sets); at the end of the epoch the counts are exact.

Every choice is Philox of (seed, "mixture_lanes", stretch, epoch).
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
class Share:
    """What one data set gives to an epoch: the places ``begin`` to ``end`` of its own epochs, of ``rows`` rows each, laid end to end."""

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
        """Groups that the share touches; the first and the last one, and those at the end of an own epoch, may have fewer rows."""
        return self._group_of(self.end - 1) - self._group_of(self.begin) + 1

    def first_place(self, group: int) -> int:
        """Where a group of the share begins, without what lies outside of it."""
        epoch, turn = divmod(self._group_of(self.begin) + group, self._groups_of_epoch)
        return min(max(epoch * self.rows + turn * LANES, self.begin), self.end)

    def places(self, low: int, high: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Places of the rows of groups low to high, [groups, lanes], and which of them there are."""
        epoch, turn = np.divmod(self._group_of(self.begin) + np.arange(low, high), self._groups_of_epoch)
        position = turn[:, None] * LANES + np.arange(LANES)
        places = epoch[:, None] * self.rows + position
        return places, (position < self.rows) & (places >= self.begin) & (places < self.end)


class Interleave:
    """One epoch of a mixture of so many shares."""

    def __init__(self, shares: Sequence[Share], epoch: int, seed: int | None) -> None:
        self.shares = shares
        self._seed = None if seed is None else epoch_seed(seed, epoch)
        self._groups = [share.groups for share in shares]
        self.stretches = -(-sum(self._groups) // TURNS)

    def begin(self, stretch: int) -> int:
        """The first position of a stretch; of the one after the last, the length of the epoch."""
        groups = self.groups_before(stretch)
        return sum(share.first_place(group) - share.begin for share, group in zip(self.shares, groups))

    def find(self, position: int) -> int:
        """The stretch that holds a position."""
        low, high = 0, self.stretches
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.begin(middle) <= position else (low, middle)
        return low

    def groups_before(self, stretch: int) -> list[int]:
        """How many groups of each share come before a stretch.

        Halves of the list share the groups by their sizes, rounded; their halves share what they got, and so on. Nothing
        is given back as the number grows, and each of the log2(shares) roundings moves half a group at most.
        """
        return _divided(min(stretch * TURNS, sum(self._groups)), self._groups)

    def stretch(self, stretch: int) -> tuple[Ints, Ints]:
        """Number of the share and place in it, of each position of a stretch: [n] each."""
        low, high = self.groups_before(stretch), self.groups_before(stretch + 1)
        if self._seed is None:
            bounds = [(share.first_place(a), share.first_place(b)) for share, a, b in zip(self.shares, low, high)]
            sources, turns = _evenly([end - begin for begin, end in bounds])
            return sources, np.asarray([begin for begin, _ in bounds])[sources] + turns
        sources, turns = _evenly([b - a for a, b in zip(low, high)])
        tables = [share.places(a, b) for share, a, b in zip(self.shares, low, high)]
        first = np.cumsum([0] + [b - a for a, b in zip(low, high)])[sources] + turns
        places, there = (np.concatenate(part)[first] for part in zip(*tables))
        # each lane begins elsewhere: in a 64th of its own of the turns, so that any 64 positions are mixed too
        lanes = np.arange(LANES)
        random = integers(self._seed, "mixture_lanes", np.asarray([stretch], np.uint64), 2 * LANES)[0]
        part = np.argsort(random[:LANES], kind="stable") + unit(random[LANES:])
        begins = (part * (len(sources) / LANES)).astype(np.int64)
        turn = (np.arange(len(sources))[:, None] + begins) % len(sources)
        chosen = there[turn, lanes]
        return np.broadcast_to(sources[turn], turn.shape)[chosen], places[turn, lanes][chosen]


def _divided(count: int, sizes: Sequence[int]) -> list[int]:
    """A number of things divided in proportion to sizes, none negative or more than its size where count is at most their sum."""
    if len(sizes) == 1:
        return [count]
    half = len(sizes) // 2
    left, right = sum(sizes[:half]), sum(sizes[half:])
    given = (2 * count * left + left + right) // (2 * (left + right))
    return _divided(given, sizes[:half]) + _divided(count - given, sizes[half:])


def _evenly(counts: Sequence[int]) -> tuple[Ints, Ints]:
    """So many turns of each, spread evenly: whose turn it is, and which of its turns."""
    sources = np.repeat(np.arange(len(counts)), counts)
    turns = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((turns + 0.5) / np.asarray(counts)[sources], kind="stable")
    return sources[order], turns[order]


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """A whole number divided in proportion to weights, each within one of its share (Hamilton's method; ties to the first)."""
    whole = math.fsum(weights)
    exact = [total * weight / whole for weight in weights]
    given = [math.floor(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (given[i] - exact[i], i))
    for i in order[: total - sum(given)]:
        given[i] += 1
    return given
