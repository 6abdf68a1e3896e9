"""The map-style data set, and the sampler that gives its rows out in the order of the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler

from .._order import State
from ..dataset import Dataset
from ..place import GlobalBatch
from ._callers import refuse_dealing_again
from ._epochs import Epochs
from ._rows import Row, Rows, collate


class Indices(list[int]):
    """Row numbers of one batch, with the state after it and its place in the epoch."""

    state: State | None = None
    global_batch: GlobalBatch | None = None


class ShardDataset(Epochs, TorchDataset[Any]):
    """A map-style data set: ``ds[i]`` is row i as tensors, and ``ds.batch_sampler`` deals the rows of an epoch in batches.

    :class:`stillhouse.torch.DataLoader` takes it, and so does torch's: with the order of this package
    (``DataLoader(ds, batch_sampler=ds.batch_sampler, num_workers=K)``) or with any other
    (``DataLoader(ds, batch_size=32, shuffle=True)``, a ``DistributedSampler``, what Hugging Face's Trainer makes). Batches are
    :class:`~stillhouse.Batch` in each case; a ``collate_fn`` of your own gets a sequence of rows, and :func:`collate` makes the batch of
    them. With a sampler of somebody else's this data set has no epochs (give views their ``epoch``), deals nothing to ranks, and rows cost the pages
    that hold them.

    Arguments are those of :class:`StreamingShardDataset`; the order is the same as well. For whole epochs that one is
    faster: it knows what comes next and reads ahead.
    """

    dataset: Dataset

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batch_sampler = BatchSampler(self)

    def __len__(self) -> int:
        """Rows."""
        return len(self.dataset)

    def __getitem__(self, row: int) -> Row:
        batch = self.dataset.read(np.asarray([row])).torch()
        return Rows(batch, self.transform)[0]

    def __getitems__(self, rows: Sequence[int]) -> Rows:
        """Several rows at once; torch's DataLoader calls this."""
        batch = self.dataset.read(np.asarray(rows, dtype=np.int64))
        # by a sampler of somebody else's there is no place to go on at, but views must know the epoch that was set
        batch.state = getattr(rows, "state", None) or {"epoch": self._place.get()[0]}
        batch.global_batch = getattr(rows, "global_batch", None)
        return Rows(batch.torch(), self.transform)

    collate = staticmethod(collate)


class BatchSampler(Sampler[list[int]]):
    """The rows of each batch of this rank, in the order of the epoch. Goes on from where the data set's state says.

    Its iterator has ``state_dict`` and ``load_state_dict``, which torchdata's StatefulDataLoader uses.
    """

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return self.dataset.batches_per_epoch()

    def set_epoch(self, epoch: int) -> None:
        """:meth:`ShardDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

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
        self.dataset._now = None

    def __next__(self) -> list[int]:
        if self._left <= 0:
            self._move_on()  # a rank without a batch, or a state of the end
            raise StopIteration
        rows, self._position = next(self._steps)
        self._left -= 1
        if self._left == 0:
            self._move_on()  # nobody may ever ask for one more
        indices = Indices(rows.tolist())
        indices.state = self.dataset.state_at(self.epoch, self._position)
        indices.global_batch = self.dataset.global_batch(self.epoch, self._start, self._position)
        return indices

    def _move_on(self) -> None:
        if self.dataset.epoch == self.epoch:  # nobody set another one meanwhile
            self.dataset._place.set(self.epoch + 1, 0)

    def state_dict(self) -> State:
        return self.dataset.state_at(self.epoch, self._position)

    def load_state_dict(self, state: State) -> None:
        self.dataset.load_state_dict(state)
        self._go(int(state["epoch"]), int(state["position"]))
