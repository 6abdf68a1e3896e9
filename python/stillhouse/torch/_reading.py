"""One iteration over a data set: the batches of this process, read ahead by threads of the Rust core."""

from __future__ import annotations

from collections.abc import Iterator

from .. import _core
from ..batch import Batch
from ._epochs import Epochs


class Reading(Iterator[Batch]):
    """The batches of one worker (of ``workers``) from a position of an epoch on, as numpy arrays with their state.

    Whoever asks again after an error gets what was not given out, not an early end.
    """

    def __init__(self, dataset: Epochs, epoch: int, start: int, worker: int = 0, workers: int = 1) -> None:
        dataset.refuse_empty()
        self.dataset = dataset
        self.epoch, self.start = epoch, start
        self.worker, self.workers = worker, workers
        self.given = 0
        self.batches = dataset.steps(epoch, start).own_batches
        """Batches of this rank in the whole iteration, over all workers."""
        self._stream: _core.Stream | None = None

    @property
    def left(self) -> bool:
        """Whether this worker has a batch still to come."""
        return self.worker + self.given * self.workers < self.batches

    def __next__(self) -> Batch:
        if not self.left:
            self._stream = None
            raise StopIteration
        dataset = self.dataset
        if self._stream is None:
            # past what was given out already: this worker's batches are every `workers`-th from `worker` on
            turn = self.worker + self.given * self.workers
            begin = dataset.after(self.epoch, self.start, turn)["position"]
            self._stream = dataset.steps(self.epoch, begin, 0, self.workers).stream()
        try:
            columns, position = next(self._stream)
        except BaseException:
            self._stream = None
            raise
        self.given += 1
        batch = dataset.dataset._batch(columns, dataset.state_at(self.epoch, position))
        batch.global_batch = dataset.global_batch(self.epoch, self.start, position)
        return batch
