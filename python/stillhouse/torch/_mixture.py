"""A mixture of data sets: the rows of an epoch, and the batches that each rank and worker takes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .._epochs_base import identity_of
from .._order import Order, Share, steps_of
from ..batch import Batch
from ..dataset import Dataset
from ..mixed import REPEAT, SOURCE, info_of, put_together
from ..views.keyed import epoch_seed
from ._ahead import PythonSteps, window_fits
from ._interleave import LANES, Interleave, Ints, Quota

_NUMBERS = 8192
"""Row numbers in one request to the core."""


class Mixture:
    """Several data sets by name, and the number of rows that an epoch takes of each."""

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
        """The split of every data set, for messages."""
        return " and ".join(dict.fromkeys(source.split for source in self.sources.values()))

    def identity(self) -> dict[str, Any]:
        """The facts that a state must match."""
        facts = {
            name: {**identity_of(source), "rows_per_epoch": self.rows[name]} for name, source in self.sources.items()
        }
        return {"mixture": facts, "rows": len(self)}

    def interleave(self, epoch: int, seed: int | None) -> Interleave:
        """The order of an epoch. Each data set goes on where the previous epoch ended."""
        quotas = [
            Quota(epoch * self.rows[name], (epoch + 1) * self.rows[name], len(source))
            for name, source in self.sources.items()
        ]
        return Interleave(quotas, epoch, seed)

    def read(self, rows: Ints, whole_blocks: Sequence[bool]) -> Batch:
        """The batch of rows [b, 3], each (number of the data set, row in it, number of its round), in that order.

        ``whole_blocks`` says of which data sets to read whole blocks.
        """
        parts = []
        for number, (source, whole) in enumerate(zip(self.sources.values(), whole_blocks)):
            places = np.flatnonzero(rows[:, 0] == number)
            if len(places):
                parts.append((places, source.read(rows[places, 1], whole)))
        columns = put_together(parts, len(rows))
        return Batch({**columns, SOURCE: rows[:, 0].copy(), REPEAT: rows[:, 2].copy()}, self.info)


def _refuse_different(sources: Mapping[str, Dataset]) -> None:
    """Raises ``ValueError`` unless all data sets have the same columns and tokenizer."""
    (first_name, first), *others = sources.items()
    for name, source in others:
        missing = sorted(first.columns.keys() ^ source.columns.keys())
        if missing:
            has = first_name if missing[0] in first.columns else name
            common = [column for column in first.columns if column in source.columns]
            raise ValueError(
                f"columns: {first_name} has {', '.join(first.columns)}; {name} has {', '.join(source.columns)}; "
                f"only {has} has {missing[0]}; valid: the same, such as columns={common}"
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
                f"{source.manifest['tokenizer'].get('source')} (sha256 {theirs}); valid: the same, because one id "
                "must be one token"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "of rows that differ in length" if shape is None else f"{list(shape)}"


class _Draws:
    """Row numbers of one data set, its epochs one after the other."""

    def __init__(self, source: Dataset, order: Order) -> None:
        self._source, self._order = source, order
        self._begin = 0
        self._numbers = np.zeros(0, np.int64)
        self._steps: Iterator[tuple[npt.NDArray[np.uint64], int]] = iter(())

    def take(self, begin: int, end: int) -> Ints:
        """The row numbers from one place to another. A call that begins where the last one ended costs least."""
        known = self._begin + len(self._numbers)
        if not self._begin <= begin <= known:
            self._begin, self._numbers, self._steps = begin, self._numbers[:0], iter(())
        else:
            self._numbers, self._begin = self._numbers[begin - self._begin :], begin
        parts, count = [self._numbers], len(self._numbers)
        while count < end - begin:
            more = next(self._steps, None)
            if more is None:
                epoch, position = divmod(begin + count, len(self._source))
                self._steps = steps_of(self._source, self._order, Share(_NUMBERS), epoch, position)
            else:
                parts.append(more[0].astype(np.int64))
                count += len(more[0])
        self._numbers = np.concatenate(parts)
        return self._numbers[: end - begin]


class MixedSteps(PythonSteps):
    """The batches of one worker: (rows [b, 3] as :meth:`Mixture.read` takes them, position after the batch).

    Holds one stretch of the order, and a few thousand row numbers of each data set.
    """

    def __init__(
        self, mixture: Mixture, order: Order, share: Share, epoch: int, start: int, worker: int, workers: int
    ) -> None:
        super().__init__(worker, workers)
        self._mixture, self._order, self._share, self._start = mixture, order, share, start
        self._interleave = mixture.interleave(epoch, order.shuffle_seed)
        self._repeats = [quota.begin // quota.rows for quota in self._interleave.quotas]
        self._draws = [
            _Draws(source, replace(order, seed=epoch_seed(order.seed, number)))
            for number, source in enumerate(mixture.sources.values())
        ]
        self._low = self._high = 0
        self._rows = np.zeros((0, 3), np.int64)
        left = len(mixture) - start
        full, rest = divmod(left, share.global_rows)
        self.own_batches = full + (rest > share.rank and not share.leaves_out(left))

    def _step(self, number: int) -> tuple[Ints, int]:
        begin = self._start + number * self._share.global_rows
        end = min(begin + self._share.global_rows, len(self._mixture))
        return self._rows_from(begin + self._share.rank, end), end

    def _read(self, rows: Ints) -> Batch:
        return self._mixture.read(rows, self._whole_blocks)

    @cached_property
    def _whole_blocks(self) -> list[bool]:
        ranks = math.gcd(self._share.world_size, LANES)
        return [window_fits(source, self._order.shuffle_blocks, ranks) for source in self._mixture.sources.values()]

    def _rows_from(self, position: int, end: int) -> Ints:
        """Every ``world_size``-th row from a position on."""
        parts = []
        while position < end:
            if not self._low <= position < self._high:
                self._load(self._interleave.find(position))
            part = self._rows[position - self._low : end - self._low : self._share.world_size]
            parts.append(part)
            position += len(part) * self._share.world_size
        return np.concatenate(parts)

    def _load(self, stretch: int) -> None:
        sources, places = self._interleave.stretch(stretch)
        numbers, repeats = np.empty_like(places), np.empty_like(places)
        for number, (draws, quota) in enumerate(zip(self._draws, self._interleave.quotas)):
            mine = sources == number
            if mine.any():
                own = places[mine]
                numbers[mine] = draws.take(own.min(), own.max() + 1)[own - own.min()]
                repeats[mine] = own // quota.rows - self._repeats[number]
        self._low = self._interleave.begin(stretch)
        self._high = self._low + len(sources)
        self._rows = np.stack([sources, numbers, repeats], axis=1)
