"""The batches of an epoch by tokens: where the order of the rows is cut, and who takes which batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..batch import _AFTER, _BEFORE, Batch, Ragged
from ..dataset import Dataset
from ..views.keyed import epoch_seed, integers
from ._ahead import ReadAhead, window_fits

Ints = npt.NDArray[np.int64]


def lengths_of(dataset: Dataset) -> npt.NDArray[np.int32]:
    """Tokens of every row without padding, int32 [rows].

    Where rows are padded, ``attention_mask`` of all rows is read; where they differ in length ``input_ids``; else nothing.
    """
    columns = {column["name"] for column in dataset.manifest["columns"]}
    if "attention_mask" in columns:
        return _read_lengths(dataset, "attention_mask")
    shape = dataset.select_columns(["input_ids"]).columns["input_ids"].shape
    return _read_lengths(dataset, "input_ids") if shape is None else np.full(len(dataset), shape[0], np.int32)


def _read_lengths(dataset: Dataset, name: str) -> npt.NDArray[np.int32]:
    """Values of each row of a column that differs in length, true ones of one that does not: one batch in memory at a time."""
    found = [np.zeros(0, np.int64)]
    for batch in dataset.select_columns([name]).batches(4096):
        column: Any = batch[name]
        found.append(column.lengths if isinstance(column, Ragged) else column.sum(axis=1))
    return _joined(found)


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int32]:
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)


def trimmed(batch: Batch, length: int) -> Batch:
    """A batch whose padding ends at a length: columns [B, L, ...] and [B, D, L, ...] become shorter. Rows that differ in length stay."""
    made = dict(batch)
    for name, column in batch.items():
        if isinstance(column, Ragged):
            continue
        if name in _AFTER:
            made[name] = np.ascontiguousarray(column[:, :length])
        elif name in (*_BEFORE, "noise"):
            made[name] = np.ascontiguousarray(column[:, :, :length])
    return Batch(made, batch.info, batch.state)


@dataclass(frozen=True)
class TokenBatches:
    """One epoch: its rows in the order in which they are given out, and the positions where batches begin, with the end at last."""

    rows: Ints
    bounds: Ints

    @classmethod
    def cut(
        cls, order: Ints, lengths: npt.NDArray[np.int32], max_tokens: int, window: int, seed: int | None, epoch: int
    ) -> TokenBatches:
        """Cuts an order of rows; each ``window`` rows of it are sorted by length before, and their batches shuffled afterwards.

        With a window of 1 nothing is sorted, and batches are cut from one end of the epoch to the other.
        """
        rows, sizes = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
        for number, begin in enumerate(range(0, len(order), window if window > 1 else max(1, len(order)))):
            some = order[begin : begin + window] if window > 1 else order
            if window > 1:
                some = some[np.argsort(lengths[some], kind="stable")]
            bounds = _greedily(lengths[some].astype(np.int64), max_tokens)
            batches = [some[a:b] for a, b in zip(bounds, bounds[1:])]
            if window > 1 and seed is not None:
                keys = integers(
                    epoch_seed(seed, epoch), "length_batches", np.asarray([number], np.uint64), len(batches)
                )
                batches = [batches[i] for i in np.argsort(keys[0], kind="stable")]
            rows += batches
            sizes.append(np.asarray([len(batch) for batch in batches], np.int64))
        return cls(np.concatenate(rows), np.cumsum(np.concatenate(sizes)))

    def filled(self, count: int) -> TokenBatches:
        """The same rows in more batches: those with most rows are halved until there are so many, or one for each row."""
        bounds = self.bounds
        while len(bounds) - 1 < min(count, len(self.rows)):
            sizes = np.diff(bounds)
            large = np.argsort(-sizes, kind="stable")[: count - len(sizes)]
            large = large[sizes[large] > max(1, sizes.max() // 2)]
            bounds = np.sort(np.concatenate([bounds, bounds[large] + sizes[large] // 2]))
        return TokenBatches(self.rows, bounds)

    def batch_at(self, position: int) -> int:
        """The number of the batch that begins at a position; for the end, the number of batches.

        Raises ``ValueError`` where none does.
        """
        found = int(np.searchsorted(self.bounds, position))
        if self.bounds[found] != position:
            raise ValueError(
                f"state: got position {position}, valid: where a batch begins, such as {self.bounds[found - 1]}"
            )
        return found

    def step(self, batch: int, world: int, drop_last: bool | None) -> list[tuple[int, int]]:
        """The batches of all ranks, as positions from and to, of a step that begins with a batch; none where the epoch is over.

        Where fewer batches than ranks are left, those with most rows are divided until there is one for each rank; see ``drop_last`` of the data set.
        """
        bounds = self.bounds[batch : batch + world + 1].tolist()
        parts = list(zip(bounds, bounds[1:]))
        if len(parts) == world or drop_last is False:
            return parts
        if drop_last or sum(b - a for a, b in parts) < world:
            return []
        while len(parts) < world:
            a, b = max(parts, key=lambda part: (part[1] - part[0], -part[0]))
            at = parts.index((a, b))
            parts[at : at + 1] = [(a, (a + b) // 2), ((a + b) // 2, b)]
        return parts


def batches_of_every_epoch(first: TokenBatches, lengths: npt.NDArray[np.int32], shuffled: bool) -> int:
    """A number of batches that all epochs are brought to, from how many the first one was cut into.

    Where rows have one length, or always come in the same order, that is the number. Else epochs differ, as rows meet in other batches: by much less than the square root,
    which is how far numbers of independent things are apart.
    """
    count = len(first.bounds) - 1
    if not shuffled or len(lengths) == 0 or lengths.min() == lengths.max():
        return count
    return min(count + math.isqrt(count) + 1, len(lengths))


def _greedily(lengths: Ints, max_tokens: int) -> list[int]:
    """Where to cut rows of such lengths so that each part has as many as fit: rows · longest ≤ max_tokens."""
    bounds = [0]
    guess = 64
    while bounds[-1] < len(lengths):
        begin = bounds[-1]
        while True:
            part = lengths[begin : begin + guess]
            padded = np.maximum.accumulate(part) * np.arange(1, len(part) + 1)
            count = int(np.searchsorted(padded, max_tokens, side="right"))
            if count < len(part) or begin + len(part) == len(lengths):
                break
            guess *= 2
        bounds.append(begin + count)
    return bounds


class TokenSteps(Iterator[tuple[Ints, int]]):
    """The batches of one worker: (row numbers, position after the batches of all ranks)."""

    def __init__(
        self,
        dataset: Dataset,
        batches: TokenBatches,
        lengths: npt.NDArray[np.int32],
        *,
        start: int,
        rank: int,
        world: int,
        drop_last: bool | None,
        worker: int,
        workers: int,
        window_blocks: int,
    ) -> None:
        self._dataset, self._batches, self._lengths = dataset, batches, lengths
        self._window_blocks = window_blocks
        self._whole_blocks: bool | None = None
        self._first = batches.batch_at(start)
        self._rank, self._world, self._drop_last = rank, world, drop_last
        self._next, self._workers = worker, workers
        count = len(batches.bounds) - 1
        full, rest = divmod(count - self._first, world)
        last = batches.step(count - rest, world, drop_last) if rest else []
        self.own_batches = full + (rank < len(last))
        """Batches of this trainer from here to the end of the epoch, over all its workers."""
        self.given_out = full + bool(last)
        """Those of the trainer with most."""

    def __next__(self) -> tuple[Ints, int]:
        if self._next >= self.own_batches:
            raise StopIteration
        step = self._batches.step(self._first + self._next * self._world, self._world, self._drop_last)
        self._next += self._workers
        a, b = step[self._rank]
        return self._batches.rows[a:b], step[-1][1]

    def read(self) -> tuple[Batch, int] | None:
        """The next batch, read, and the position after it."""
        step = next(self, None)
        if step is None:
            return None
        if self._whole_blocks is None:
            self._whole_blocks = window_fits(self._dataset, self._window_blocks)
        rows, after = step
        return trimmed(self._dataset.read(rows, self._whole_blocks), int(self._lengths[rows].max())), after

    def stream(self) -> ReadAhead:
        """Starts to read them."""
        return ReadAhead(self)
