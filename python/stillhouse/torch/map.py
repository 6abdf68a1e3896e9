"""The map-style data set, and the sampler of its batches in the order of the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from .._epochs_base import State
from ..place import GlobalBatch
from ._callers import refuse_dealing_again
from ._epochs import Epochs, EpochSampler
from ._rows import Row, Rows, collate


class Indices(list[int]):
    """Row numbers of one batch, with the state after it and its global batch."""

    state: State | None = None
    global_batch: GlobalBatch | None = None


class ShardDataset(Epochs, TorchDataset[Any]):
    """A map-style data set: ``ds[i]`` is row i as tensors, and ``ds.batch_sampler`` gives the batches of an epoch.

    Loaders for it:

    - :class:`stillhouse.torch.DataLoader`.
    - torch's, in the order of this package: ``DataLoader(ds, batch_sampler=ds.batch_sampler, num_workers=K)``.
    - torch's, in any other order: ``DataLoader(ds, batch_size=32, shuffle=True)``, a ``DistributedSampler``, or the
      loader of Hugging Face's Trainer. This data set then has no epochs (pass ``epoch`` to views) and does not share
      its rows among ranks, and each row costs the pages that hold it.

    Each gives a :class:`~stillhouse.Batch`. A ``collate_fn`` of your own gets a sequence of rows, and :func:`collate`
    makes a batch of them.

    Arguments and order are those of :class:`StreamingShardDataset`, which is faster for whole epochs because it reads
    ahead.
    """

    @property
    def batch_sampler(self) -> BatchSampler:
        """The batches of this rank, in the order of the epoch."""
        return BatchSampler(self)

    def __len__(self) -> int:
        """Rows."""
        return len(self.dataset)

    def __getitem__(self, row: int) -> Row:
        batch = self.dataset.read(np.asarray([row])).torch()
        return Rows(batch, self.transform)[0]

    def __getitems__(self, rows: Sequence[int]) -> Rows:
        """Several rows at once; torch's DataLoader calls this."""
        batch = self.dataset.read(np.asarray(rows, dtype=np.int64))
        # row numbers of another sampler have no state, but views need the epoch that was set
        batch.state = getattr(rows, "state", None) or {"epoch": self._place.get()[0]}
        batch.global_batch = getattr(rows, "global_batch", None)
        return Rows(batch.torch(), self.transform)

    collate = staticmethod(collate)


class BatchSampler(EpochSampler):
    """The rows of each batch of this rank, in the order of the epoch. Begins at the data set's state.

    torchdata's StatefulDataLoader uses ``state_dict`` and ``load_state_dict`` of its iterator.
    """

    dataset: ShardDataset

    def __iter__(self) -> Iterator[list[int]]:
        refuse_dealing_again()
        return _Batches(self.dataset)


class _Batches(Iterator[list[int]]):
    """One iteration: the rows of batch after batch."""

    def __init__(self, dataset: ShardDataset) -> None:
        dataset.refuse_empty()
        self.dataset = dataset
        self._go(*dataset._begin())

    def _go(self, epoch: int, start: int) -> None:
        self.epoch = epoch
        self._start = self._position = start
        self._steps = self.dataset.steps(epoch, start)
        self._left = self._steps.own_batches
        self.dataset._last_state = None

    def __next__(self) -> list[int]:
        if self._left <= 0:
            self._move_on()  # with drop_last=False, a rank may have no batch in the rest of an epoch
            raise StopIteration
        rows, self._position = next(self._steps)
        self._left -= 1
        if self._left == 0:
            self._move_on()  # the caller may never ask for one more
        indices = Indices(rows.tolist())
        indices.state = self.dataset.state_at(self.epoch, self._position)
        indices.global_batch = self.dataset.global_batch(self.epoch, self._start, self._position)
        return indices

    def _move_on(self) -> None:
        if self.dataset.epoch == self.epoch:  # the caller set no other one meanwhile
            self.dataset._place.set(self.epoch + 1, 0)

    def state_dict(self) -> State:
        return self.dataset.state_at(self.epoch, self._position)

    def load_state_dict(self, state: State) -> None:
        self.dataset.load_state_dict(state)
        self._go(int(state["epoch"]), int(state["position"]))
