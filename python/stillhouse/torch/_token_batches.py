"""Batches by tokens: where the order of an epoch is cut, and which rank takes which batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .._order import Order, Share
from ..batch import _AFTER, _BEFORE, Batch, Ragged
from ..dataset import Dataset
from ..views.keyed import epoch_seed, integers
from ._ahead import PythonSteps, window_fits
from ._interleave import Ints


def lengths_of(dataset: Dataset) -> npt.NDArray[np.int32]:
    """Tokens of every row without padding, int32 [rows].

    Reads ``attention_mask`` of all rows where they are padded, ``input_ids`` where they differ in length, and else
    nothing.
    """
    columns = {column["name"] for column in dataset.manifest["columns"]}
    if "attention_mask" in columns:
        return _read_lengths(dataset, "attention_mask")
    shape = dataset.select_columns(["input_ids"]).columns["input_ids"].shape
    return _read_lengths(dataset, "input_ids") if shape is None else np.full(len(dataset), shape[0], np.int32)


def _read_lengths(dataset: Dataset, name: str) -> npt.NDArray[np.int32]:
    """Values of each row of a ragged column, true values of each row of another. One batch is in memory at a time."""
    found = [np.zeros(0, np.int64)]
    for batch in dataset.select_columns([name]).batches(4096):
        column: Any = batch[name]
        found.append(column.lengths if isinstance(column, Ragged) else column.sum(axis=1))
    return _joined(found)


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int32]:
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)


def trimmed(batch: Batch, length: int) -> Batch:
    """A batch cut to a length: columns [B, L, ...] and [B, D, L, ...] become shorter. Ragged columns stay."""
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
    """One epoch: its rows in order, and the positions where batches begin. The last bound is the end of the epoch."""

    rows: Ints
    bounds: Ints

    @classmethod
    def cut(
        cls, order: Ints, lengths: npt.NDArray[np.int32], max_tokens: int, window: int, seed: int | None, epoch: int
    ) -> TokenBatches:
        """Sorts each ``window`` rows by length, cuts them into batches, and shuffles these batches if there is a seed.

        With a window of 1 it sorts nothing and cuts the epoch from one end to the other.
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
        """The same rows in ``count`` batches, or one for each row. It halves the batches with most rows."""
        bounds = self.bounds
        while len(bounds) - 1 < min(count, len(self.rows)):
            sizes = np.diff(bounds)
            large = np.argsort(-sizes, kind="stable")[: count - len(sizes)]
            large = large[sizes[large] > max(1, sizes.max() // 2)]
            bounds = np.sort(np.concatenate([bounds, bounds[large] + sizes[large] // 2]))
        return TokenBatches(self.rows, bounds)

    def batch_at(self, position: int) -> int:
        """The number of the batch that begins at a position; at the end of the epoch, the number of batches.

        Raises ``ValueError`` where no batch begins.
        """
        found = int(np.searchsorted(self.bounds, position))
        if self.bounds[found] != position:
            raise ValueError(
                f"state: got position {position}, valid: where a batch begins, such as {self.bounds[found - 1]}"
            )
        return found

    def step(self, batch: int, share: Share) -> list[tuple[int, int]]:
        """The batches of all ranks in the step that begins with this one, as positions (from, to); none after the end.

        Where fewer batches than ranks are left, ``drop_last=None`` divides those with most rows until each rank has
        one.
        """
        world, drop_last = share.world_size, share.drop_last
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
    """The number of batches of every epoch, from the first one as :meth:`TokenBatches.cut` gives it.

    Epochs have equally many batches where rows have one length, or come in the same order every time. Else the numbers
    differ by much less than the square root, the deviation of a count of independent things.
    """
    count = len(first.bounds) - 1
    if not shuffled or len(lengths) == 0 or lengths.min() == lengths.max():
        return count
    return min(count + math.isqrt(count) + 1, len(lengths))


def _greedily(lengths: Ints, max_tokens: int) -> list[int]:
    """Bounds of the parts of rows of these lengths. Each part has as many rows as fit: rows · longest ≤ max_tokens."""
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


class TokenSteps(PythonSteps):
    """The batches of one worker: (row numbers, position after the batches of all ranks)."""

    def __init__(
        self,
        dataset: Dataset,
        batches: TokenBatches,
        lengths: npt.NDArray[np.int32],
        order: Order,
        share: Share,
        start: int,
        worker: int,
        workers: int,
    ) -> None:
        super().__init__(worker, workers)
        self._dataset, self._batches, self._lengths = dataset, batches, lengths
        self._order, self._share = order, share
        self._first = batches.batch_at(start)
        count = len(batches.bounds) - 1
        full, rest = divmod(count - self._first, share.world_size)
        last = batches.step(count - rest, share) if rest else []
        self.own_batches = full + (share.rank < len(last))
        self.given_out = full + bool(last)
        """Batches of the rank that has most."""

    def _step(self, number: int) -> tuple[Ints, int]:
        step = self._batches.step(self._first + number * self._share.world_size, self._share)
        a, b = step[self._share.rank]
        return self._batches.rows[a:b], step[-1][1]

    def _read(self, rows: Ints) -> Batch:
        return trimmed(self._dataset.read(rows, self._whole_blocks), int(self._lengths[rows].max()))

    @cached_property
    def _whole_blocks(self) -> bool:
        return window_fits(self._dataset, self._order.shuffle_blocks)
