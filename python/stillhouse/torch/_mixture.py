"""Rows of several data sets as if they were one: the order of an epoch, who takes what of it, reading ahead."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..batch import Batch
from ..dataset import Dataset
from ..mixed import REPEAT, SOURCE, info_of, put_together
from ..views.keyed import epoch_seed
from ._ahead import ReadAhead, window_fits
from ._interleave import LANES, Interleave, Ints, Share

_NUMBERS = 8192
"""Row numbers that are asked of the core at once."""


class Mixture:
    """Several data sets of which an epoch takes a number of rows each, by name."""

    def __init__(self, sources: Mapping[str, Dataset], rows: Mapping[str, int]) -> None:
        self.sources = dict(sources)
        self.rows = {name: rows[name] for name in self.sources}
        _refuse_different(self.sources)
        self.info = info_of({name: source.info for name, source in self.sources.items()})
        self.columns = next(iter(self.sources.values())).columns

    def __len__(self) -> int:
        return sum(self.rows.values())

    @property
    def url(self) -> str:
        """For messages."""
        return f"the mixture of {', '.join(self.sources)}"

    @property
    def split(self) -> str:
        """The split of all of them."""
        return " and ".join(dict.fromkeys(source.split for source in self.sources.values()))

    def identity(self) -> dict[str, Any]:
        """What a state must agree with."""
        facts = {
            name: {
                "dataset": source._core.job_hash,
                "split": source.split,
                "rows": len(source),
                "block_rows": source._core.block_rows,
                "rows_per_epoch": self.rows[name],
            }
            for name, source in self.sources.items()
        }
        return {"mixture": facts, "rows": len(self)}

    def interleave(self, epoch: int, seed: int | None) -> Interleave:
        """The order of an epoch. What each data set gives goes on where the epoch before ended."""
        shares = [
            Share(epoch * self.rows[name], (epoch + 1) * self.rows[name], len(source))
            for name, source in self.sources.items()
        ]
        return Interleave(shares, epoch, seed)

    def steps(self, **plan: Any) -> MixedSteps:
        """The batches of one worker; arguments as of the core's data set."""
        return MixedSteps(self, **plan)

    def read(self, rows: Ints, whole_blocks: Sequence[bool]) -> Batch:
        """Rows [b, 3] by (number of the data set, row in it, how often the data set came round), in that order; of which data sets by whole blocks."""
        parts = []
        for number, (source, whole) in enumerate(zip(self.sources.values(), whole_blocks)):
            places = np.flatnonzero(rows[:, 0] == number)
            if len(places):
                parts.append((places, source.read(rows[places, 1], whole)))
        columns = put_together(parts, len(rows))
        return Batch({**columns, SOURCE: rows[:, 0].copy(), REPEAT: rows[:, 2].copy()}, self.info)


def _refuse_different(sources: Mapping[str, Dataset]) -> None:
    """Rows of one batch must have the same columns, of one tokenizer."""
    (first_name, first), *others = sources.items()
    for name, source in others:
        missing = sorted(first.columns.keys() ^ source.columns.keys())
        if missing:
            has = first_name if missing[0] in first.columns else name
            raise ValueError(
                f"columns: {first_name} has {', '.join(first.columns)}; {name} has {', '.join(source.columns)}; only {has} has "
                f"{missing[0]}; valid: the same, such as columns={[c for c in first.columns if c in source.columns]}"
            )
        for column, ours in first.columns.items():
            theirs = source.columns[column]
            if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
                raise ValueError(
                    f"column {column}: {first_name} has {ours.dtype} {_shape(ours.shape)}, {name} has {theirs.dtype} "
                    f"{_shape(theirs.shape)}; valid: the same type and shape"
                )
        ours, theirs = (one.manifest["tokenizer"].get("sha256") for one in (first, source))
        if ours != theirs:
            raise ValueError(
                f"tokenizer: {first_name} has {first.manifest['tokenizer'].get('source')} (sha256 {ours}), {name} has "
                f"{source.manifest['tokenizer'].get('source')} (sha256 {theirs}); valid: the same, since one id must be one token"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "of rows that differ in length" if shape is None else f"{list(shape)}"


class _Draws:
    """Row numbers of one data set, its shuffled epochs laid end to end."""

    def __init__(self, source: Dataset, seed: int | None, window_blocks: int) -> None:
        self._source, self._seed, self._window_blocks = source, seed, window_blocks
        self._begin = 0
        self._numbers = np.zeros(0, np.int64)
        self._steps: Iterator[tuple[npt.NDArray[np.uint64], int]] = iter(())

    def take(self, begin: int, end: int) -> Ints:
        """Those from one place to another. Going on where the last ones ended costs least."""
        known = self._begin + len(self._numbers)
        if not self._begin <= begin <= known:
            self._begin, self._numbers, self._steps = begin, self._numbers[:0], iter(())
        else:
            self._numbers, self._begin = self._numbers[begin - self._begin :], begin
        parts, count = [self._numbers], len(self._numbers)
        while count < end - begin:
            more = next(self._steps, None)
            if more is None:
                self._steps = self._from(begin + count)
            else:
                parts.append(more[0].astype(np.int64))
                count += len(more[0])
        self._numbers = np.concatenate(parts)
        return self._numbers[: end - begin]

    def _from(self, place: int) -> _core.Steps:
        """The rest of the epoch that a place is in."""
        epoch, position = divmod(place, len(self._source))
        return self._source._core.steps(
            epoch=epoch, seed=self._seed, window_blocks=self._window_blocks, start=position, rank=0, world=1,
            batch_rows=_NUMBERS, drop_last=False, worker=0, workers=1,
        )  # fmt: skip


class MixedSteps(Iterator[tuple[Ints, int]]):
    """The batches of one worker: (rows [b, 3] as :meth:`Mixture.read` takes them, position after the batch).

    Holds one stretch of the order, and a few thousand row numbers of each data set.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        epoch: int,
        seed: int | None,
        window_blocks: int,
        start: int,
        rank: int,
        world: int,
        batch_rows: int,
        drop_last: bool,
        worker: int,
        workers: int,
    ) -> None:
        self.mixture = mixture
        self._order = mixture.interleave(epoch, seed)
        self._repeats = [share.begin // share.rows for share in self._order.shares]
        self._draws = [
            _Draws(source, None if seed is None else epoch_seed(seed, number), window_blocks)
            for number, source in enumerate(mixture.sources.values())
        ]
        self._start, self._rank, self._world = start, rank, world
        self._global = batch_rows * world
        self._next, self._workers = worker, workers
        self._window_blocks = window_blocks
        self._whole_blocks: list[bool] | None = None
        self._low = self._high = 0
        self._rows = np.zeros((0, 3), np.int64)
        full, rest = divmod(len(mixture) - start, self._global)
        self.own_rows = full * batch_rows + (0 if drop_last else max(0, -(-(rest - rank) // world)))
        """Rows that this trainer gets from here to the end of the epoch, over all its workers."""
        self.own_batches = -(-self.own_rows // batch_rows)
        """Its batches, over all its workers."""

    def __next__(self) -> tuple[Ints, int]:
        if self._next >= self.own_batches:
            raise StopIteration
        begin = self._start + self._next * self._global
        end = min(begin + self._global, len(self.mixture))
        self._next += self._workers
        return self._rows_from(begin + self._rank, end), end

    def stream(self) -> ReadAhead:
        """Starts to read them."""
        return ReadAhead(self)

    def read(self) -> tuple[Batch, int] | None:
        """The next batch, read, and the position after it."""
        step = next(self, None)
        if step is None:
            return None
        if self._whole_blocks is None:
            ranks = math.gcd(self._world, LANES)
            sources = self.mixture.sources.values()
            self._whole_blocks = [window_fits(source, self._window_blocks, ranks) for source in sources]
        return self.mixture.read(step[0], self._whole_blocks), step[1]

    def _rows_from(self, position: int, end: int) -> Ints:
        """Every ``world``-th row from a position on."""
        parts = []
        while position < end:
            if not self._low <= position < self._high:
                self._load(self._order.find(position))
            part = self._rows[position - self._low : end - self._low : self._world]
            parts.append(part)
            position += len(part) * self._world
        return np.concatenate(parts)

    def _load(self, stretch: int) -> None:
        sources, places = self._order.stretch(stretch)
        numbers, repeats = np.empty_like(places), np.empty_like(places)
        for number, (draws, share) in enumerate(zip(self._draws, self._order.shares)):
            mine = sources == number
            if mine.any():
                own = places[mine]
                numbers[mine] = draws.take(own.min(), own.max() + 1)[own - own.min()]
                repeats[mine] = own // share.rows - self._repeats[number]
        self._low = self._order.begin(stretch)
        self._high = self._low + len(sources)
        self._rows = np.stack([sources, numbers, repeats], axis=1)
