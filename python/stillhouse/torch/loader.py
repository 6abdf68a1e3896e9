"""torch's DataLoader with the right arguments filled in, and a state that fits any world size and number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from ._epochs import State
from .map import ShardDataset
from .streaming import StreamingShardDataset

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class DataLoader(TorchDataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` over a :class:`StreamingShardDataset` or :class:`ShardDataset`.

    Takes the arguments of torch's, without those that the data set decides (batch size, shuffle, samplers, ``drop_last``). Iterating it gives
    the rest of the epoch that is under way, or else the next epoch.
    """

    dataset: StreamingShardDataset | ShardDataset

    def __init__(self, dataset: StreamingShardDataset | ShardDataset, **kwargs: Any) -> None:
        if not isinstance(dataset, (StreamingShardDataset, ShardDataset)):
            raise TypeError(
                f"dataset: got {type(dataset).__name__}, valid: StreamingShardDataset, ShardDataset; "
                "for others use torch.utils.data.DataLoader"
            )
        for name in _OURS:
            if name in kwargs:
                raise TypeError(f"{name}: give it to {type(dataset).__name__}, which decides the order of the epoch")
        if not kwargs.get("in_order", True):
            raise TypeError("in_order: got False, valid: True; the state of an epoch is how far it has come, in order")
        if isinstance(dataset, ShardDataset):
            kwargs["batch_sampler"] = dataset.batch_sampler
            kwargs.setdefault("collate_fn", dataset.collate)
        else:
            kwargs["batch_size"] = None
            # without a batch size, torch would convert the batch to tensors once more
            kwargs.setdefault("collate_fn", ShardDataset.collate)
        super().__init__(dataset, **kwargs)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or else the next one."""
        return self.dataset.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, where torch has a class of its own
        dataset = self.dataset
        epoch, start = dataset._place.get()
        dataset._place.leave_to_loader(True)
        try:
            for given, batch in enumerate(super().__iter__(), start=1):
                dataset._now = dataset.after(epoch, start, given)
                yield batch
        finally:
            dataset._place.leave_to_loader(False)
        dataset._place.set(epoch + 1, 0)
        dataset._now = None

    def state_dict(self) -> State:
        """Where the trainer is: after the last batch it got, counted over all ranks. All ranks have the same; save one, of rank 0."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: State) -> None:
        """The next iteration goes on there; see :meth:`StreamingShardDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)
