"""The map-style data set, and the sampler that gives its rows out in the order of the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler

from ._epochs import Epochs, State


class Indices(list[int]):
    """Row numbers of one batch, with the state after it."""

    state: State | None = None


class ShardDataset(Epochs, TorchDataset[Any]):
    """A map-style data set: ``ds[i]`` is row i as tensors, and ``ds.batch_sampler`` deals the rows of an epoch in batches.

    ``DataLoader(ds, batch_sampler=ds.batch_sampler, collate_fn=ds.collate, num_workers=K)``, or :class:`stillhouse.torch.DataLoader`, which
    fills these in. Arguments are those of :class:`StreamingShardDataset`; the order is the same as well. It also takes samplers
    of others: rows that come alone cost the pages that hold them.

    For whole epochs :class:`StreamingShardDataset` is faster: it knows what comes next and reads ahead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batch_sampler = BatchSampler(self)

    def __len__(self) -> int:
        """Rows."""
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        batch = self.dataset.read(np.asarray([row])).torch()
        return {name: column[0] for name, column in batch.items()}

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """Several rows at once, as a batch; torch's DataLoader calls this."""
        batch = self.dataset.read(np.asarray(rows, dtype=np.int64))
        batch.state = getattr(rows, "state", None)
        return self.finish(batch)

    @staticmethod
    def collate(batch: Any) -> Any:
        """For ``collate_fn``: the batch is made already."""
        return batch


class BatchSampler(Sampler[list[int]]):
    """The rows of each batch of this rank, in the order of the epoch. Goes on from where the data set's state says.

    Its iterator has ``state_dict`` and ``load_state_dict``, which torchdata's StatefulDataLoader uses.
    """

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Batches from the place where the next iteration begins to the end of its epoch."""
        return self.dataset.steps(*self.dataset._place.get()).own_batches

    def __iter__(self) -> Iterator[list[int]]:
        return _Batches(self.dataset)


class _Batches(Iterator[list[int]]):
    """One iteration: the rows of batch after batch."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset
        self.epoch, self.start = dataset._place.get()
        self._begin()

    def _begin(self) -> None:
        self._steps = self.dataset.steps(self.epoch, self.start)
        self._position = self.start

    def __next__(self) -> list[int]:
        try:
            rows, self._position = next(self._steps)
        except StopIteration:
            if not self.dataset._place.left_to_loader:
                self.dataset._place.set(self.epoch + 1, 0)
            raise
        indices = Indices(rows.tolist())
        indices.state = self.dataset.state_at(self.epoch, self._position)
        return indices

    def state_dict(self) -> State:
        return self.dataset.state_at(self.epoch, self._position)

    def load_state_dict(self, state: State) -> None:
        self.dataset.load_state_dict(state)
        self.epoch, self.start = int(state["epoch"]), int(state["position"])
        self._begin()
