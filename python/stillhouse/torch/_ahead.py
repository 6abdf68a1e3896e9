"""Batches that a thread of Python reads ahead; the core lets go of the interpreter's lock while it reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from ..batch import Batch
from ..dataset import Dataset
from ..mixed import bytes_of
from ._interleave import LANES

_AHEAD = 3
"""Batches that are read, or being read, before they are asked for."""


def window_fits(dataset: Dataset, window_blocks: int, ranks: int = 1) -> bool:
    """Whether the cache of a data set holds the blocks of a window of its order, or those of one of the ranks that share them.

    Where it does not, blocks would be decoded again for every batch: the pages that hold its rows are cheaper.
    """
    last = len(dataset) - 1
    sample = dataset.read(np.asarray([0, last // 3, last // 3 * 2, last]))
    blocks = (-(-window_blocks // LANES) + 1) * LANES  # the last window has up to 63 more
    rows = min(len(dataset), blocks * dataset._core.block_rows) / ranks
    cache_bytes: int = dataset._arguments["cache_megabytes"] * 1_000_000
    return rows * bytes_of(sample) / sample.rows <= cache_bytes


class Readable(Protocol):
    """Steps that can be read one after the other."""

    def read(self) -> tuple[Batch, int] | None:
        """The next batch and the position after it; None after the last."""
        ...


class ReadAhead(Iterator[tuple[Batch, int]]):
    """The batches of some steps, with the position after each. An error comes in its turn."""

    def __init__(self, steps: Readable) -> None:
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
        if reader is None:  # the interpreter ends, or the object was never made
            return
        try:
            reader.shutdown(wait=False, cancel_futures=True)
        except Exception:  # noqa: BLE001, S110  # at the interpreter's end the modules that this takes are gone; so is the thread
            pass
