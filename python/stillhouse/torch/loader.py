"""A DataLoader that knows what it gave out: one state for any world size and number of workers, and every shard decoded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import DistributedSampler, Sampler

from ..batch import Batch
from ._epochs import Epochs, State
from ._place import Begun
from ._reading import Reading
from .map import ShardDataset
from .streaming import StreamingShardDataset

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
_OF_WORKERS = ("persistent_workers", "prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")


class DataLoader(TorchDataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` over a :class:`StreamingShardDataset` or :class:`ShardDataset`.

    Takes the arguments of torch's, without those that the data set decides (batch size, shuffle, samplers, ``drop_last``). Iterating it gives
    the rest of the epoch that is under way, or else the next epoch; an epoch is over when its last batch is given out.

    Threads of this process read, whatever ``num_workers`` says, so that nothing is decoded twice; the worker processes run the data set's
    ``transform`` and ``collate_fn`` on what was read. Without either there is nothing for them to do, and none is started.

    Lightning, accelerate and Hugging Face's Trainer take it as it is: rows are dealt to the ranks already, and ``set_epoch``,
    ``state_dict`` and ``load_state_dict`` are where each of them looks. ``accelerator.prepare`` gives it back, and ``accelerator.save_state``
    saves its state; batches are moved by ``batch.to(accelerator.device)``.
    """

    dataset: StreamingShardDataset | ShardDataset

    # accelerate's own marks of a loader that it need not deal to its processes, and of one whose state it saves
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

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
        self._dealt = _Dealt(dataset)
        self._inner: TorchDataLoader[Any] | None = None
        self._source = _Source()
        # without a batch size, torch would convert the batch to tensors once more
        kwargs.setdefault("collate_fn", _as_it_is)
        super().__init__(dataset, batch_size=None, **kwargs)

    @property  # type: ignore[override]  # an attribute in torch's
    def sampler(self) -> DistributedSampler[Any]:
        """Where Lightning looks for ``set_epoch``, and sees that rows are dealt to ranks already."""
        return self._dealt

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """torch's constructor sets one; the order is the data set's."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch: once the last one of an epoch is given out, the next epoch."""
        return self.dataset.epoch

    @property
    def remaining(self) -> int:
        """Batches left of the epoch that is under way."""
        return self.dataset.remaining

    def __len__(self) -> int:
        """Batches of this rank in an epoch, the same in mid-epoch."""
        return self.dataset.batches_per_epoch()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; see :meth:`StreamingShardDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, where torch has a class of its own
        dataset = self.dataset
        generation = dataset._place.begin().generation
        epoch, start = dataset._begin()
        begun = Begun(epoch, start, generation)
        reading = Reading(dataset, epoch, start)
        dataset._now = None
        batches = self._through_workers(reading)
        if reading.batches == 0:  # a rank that has no row of the last global batch
            dataset._place.end(begun, 0)
        for given, batch in enumerate(batches, start=1):
            if given == reading.batches:
                dataset._place.end(begun, given)  # nobody may ever ask for one more
            dataset._now = dataset.after(epoch, start, given)
            yield batch
        dataset._now = None

    def _through_workers(self, reading: Reading) -> Iterator[Any]:
        """What was read, transformed and collated: here, or in the worker processes."""
        loader = self._loader_of_workers() if self._inner is None else self._inner  # not `or`: loaders have a length
        if loader.persistent_workers:
            self._inner = loader
        self._source.reading = reading
        yield from loader
        if self._source.error is not None:
            raise self._source.error

    def _loader_of_workers(self) -> TorchDataLoader[Any]:
        """torch's own loader, whose indices are batches: this process reads them, and workers get them as their work."""
        work = _Work(self.dataset.transform)
        options = {name: getattr(self, name) for name in ("pin_memory", "generator", "pin_memory_device")}
        if self.num_workers and (self.dataset.transform is not None or self.collate_fn is not _as_it_is):
            options.update({name: getattr(self, name) for name in ("num_workers", *_OF_WORKERS)})
        return TorchDataLoader(work, batch_sampler=self._source, collate_fn=self.collate_fn, **options)

    def state_dict(self) -> State:
        """Where the trainer is: after the last batch it got, counted over all ranks. All ranks have the same; save one, of rank 0."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: State) -> None:
        """The next iteration goes on there; see :meth:`StreamingShardDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)


def _as_it_is(batch: Any) -> Any:
    """The batch is made already."""
    return batch


class _Source(Sampler[Any]):
    """Gives what is read to torch's loader. An error waits until what was read before it is given out."""

    reading: Reading
    error: BaseException | None = None

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[Batch]:
        self.error = None
        try:
            for batch in self.reading:
                yield batch.torch()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is raised in its turn
            self.error = error


class _Work(TorchDataset[Any]):
    """What a worker does with a batch."""

    def __init__(self, transform: Callable[[Batch], Any] | None) -> None:
        self.transform = transform

    def __getitems__(self, batch: Batch) -> Any:
        return batch if self.transform is None else self.transform(batch)


class _Dealt(DistributedSampler[Any]):
    """Tells Lightning that the rows are dealt to the ranks already, and takes the epochs that it counts."""

    def __init__(self, dataset: Epochs) -> None:
        self._epochs = dataset

    def set_epoch(self, epoch: int) -> None:
        self._epochs.set_epoch(epoch)

    def __len__(self) -> int:
        return self._epochs.batches_per_epoch()

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "this sampler only says that rows are dealt to ranks already; iterate the stillhouse.torch.DataLoader"
        )
