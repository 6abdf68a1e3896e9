"""One iteration over the batches of an epoch, read ahead by threads of the Rust core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._epochs_base import EpochsBase
from .batch import Batch


class Reading(Iterator[Batch[Any]]):
    """The batches of one worker (of ``workers``) from a position of an epoch on, as numpy arrays with their state.

    After an error, the next call reads the same batch again.
    """

    def __init__(self, epochs: EpochsBase, epoch: int, start: int, worker: int = 0, workers: int = 1) -> None:
        epochs.refuse_empty()
        self._epochs = epochs
        self.epoch, self.start = epoch, start
        self.worker, self.workers = worker, workers
        self.given = 0
        self.batches = epochs.steps(epoch, start).own_batches
        """Batches of this rank in the whole iteration, over all workers."""
        self._stream: Iterator[tuple[Any, int]] | None = None

    @property
    def _next(self) -> int:
        """Number of this worker's next batch among those of the rank."""
        return self.worker + self.given * self.workers

    @property
    def left(self) -> bool:
        """Whether this worker has a batch left."""
        return self._next < self.batches

    def go_on_after(self, given: int) -> None:
        """The next batch is the one after this worker's first ``given``."""
        self.given, self._stream = given, None

    def __next__(self) -> Batch[Any]:
        if not self.left:
            self._stream = None
            raise StopIteration
        epochs = self._epochs
        if self._stream is None:
            begin = epochs.after(self.epoch, self.start, self._next)["position"]
            self._stream = epochs.steps(self.epoch, begin, 0, self.workers).stream()
        try:
            read, position = next(self._stream)
        except BaseException:
            self._stream = None
            raise
        self.given += 1
        batch: Batch[Any] = read if isinstance(read, Batch) else epochs.dataset._batch(read)
        batch.state = epochs.state_at(self.epoch, position)
        batch.global_batch = epochs.global_batch(self.epoch, self.start, position)
        return batch
