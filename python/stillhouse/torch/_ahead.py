"""Batches that Python composes, and a thread that reads them ahead: the core reads without the interpreter's lock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..batch import Batch
from ..dataset import Dataset
from ..mixed import bytes_of
from ._interleave import LANES, Ints

_AHEAD = 3
"""Batches that are read, or being read, before they are asked for."""


def window_fits(dataset: Dataset, window_blocks: int, ranks: int = 1) -> bool:
    """Whether the cache of a data set holds the blocks of a shuffle window, or those of one of ``ranks`` ranks.

    Where it does not, whole blocks would be decoded again for every batch: reading only the pages of its rows costs
    less.
    """
    last = len(dataset) - 1
    sample = dataset.read(np.asarray([0, last // 3, last // 3 * 2, last]))
    blocks = (-(-window_blocks // LANES) + 1) * LANES  # the last window has up to 63 more
    rows = min(len(dataset), blocks * dataset._core.block_rows) / ranks
    cache_bytes: int = dataset._arguments["cache_megabytes"] * 1_000_000
    return rows * bytes_of(sample) / sample.rows <= cache_bytes


class PythonSteps(Iterator[tuple[Ints, int]], ABC):
    """The batches of one worker of a rank, with row numbers that Python finds: (row numbers, position after all ranks).

    ``worker`` takes every ``workers``-th of the rank's ``own_batches``.
    """

    own_batches: int

    def __init__(self, worker: int, workers: int) -> None:
        self._next, self._workers = worker, workers

    @abstractmethod
    def _step(self, number: int) -> tuple[Ints, int]:
        """The rank's batch of this number."""

    @abstractmethod
    def _read(self, rows: Ints) -> Batch:
        """The batch of these rows."""

    def __next__(self) -> tuple[Ints, int]:
        if self._next >= self.own_batches:
            raise StopIteration
        number = self._next
        self._next += self._workers
        return self._step(number)

    def read(self) -> tuple[Batch, int] | None:
        """The next batch and the position after it; None after the last."""
        step = next(self, None)
        return None if step is None else (self._read(step[0]), step[1])

    def stream(self) -> ReadAhead:
        """Starts to read them."""
        return ReadAhead(self)


class ReadAhead(Iterator[tuple[Batch, int]]):
    """Batches with the position after each. An error is raised in the place of its batch."""

    def __init__(self, steps: PythonSteps) -> None:
        self._steps = steps
        self._reader = ThreadPoolExecutor(1, "stillhouse-ahead")
        self._ahead: deque[Future[tuple[Batch, int] | None]] = deque()
        for _ in range(_AHEAD):
            self._ahead.append(self._reader.submit(steps.read))

    def __next__(self) -> tuple[Batch, int]:
        read = self._ahead.popleft().result() if self._ahead else None
        if read is None:
            self._ahead.clear()
            raise StopIteration
        self._ahead.append(self._reader.submit(self._steps.read))
        return read

    def __del__(self) -> None:
        reader = getattr(self, "_reader", None)
        if reader is None:  # __init__ failed, or the interpreter exits
            return
        try:
            reader.shutdown(wait=False, cancel_futures=True)
        except Exception:  # noqa: BLE001, S110  # at exit the modules that it needs may be gone
            pass
