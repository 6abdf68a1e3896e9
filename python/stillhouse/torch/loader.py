"""A DataLoader that knows what it gave out: one state for any world size and number of workers, and every shard decoded once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import DistributedSampler, Sampler

from .._order import GIVEN, State
from ..batch import Batch
from ._accelerate import under_way
from ._callers import passing_over, refuse_other_shape
from ._epochs import Epochs
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

    # accelerate's own marks of a loader that it need not deal to its processes, of one whose state it saves, and of the end of an epoch
    _is_accelerate_prepared = True
    use_stateful_dataloader = True
    end_of_dataloader = False
    remainder = 0

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
        self._epochs = dataset
        self._dealt = _Dealt(dataset)
        self._inner: TorchDataLoader[Any] | None = None
        self._source = _Source()
        self._run = _Run()
        # without a batch size, torch would convert the batch to tensors once more
        kwargs.setdefault("collate_fn", _as_it_is)
        super().__init__(dataset, batch_size=None, **kwargs)

    @property  # type: ignore[override]  # an attribute in torch's
    def dataset(self) -> StreamingShardDataset | ShardDataset:
        """The data set. (Not for Hugging Face's Trainer that resumes: it makes a loader of parts, and passes over batches in between.)"""
        return _Work(self._epochs.transform) if passing_over() else self._epochs  # type: ignore[return-value]

    @dataset.setter
    def dataset(self, value: Any) -> None:
        """torch's constructor sets it; Lightning looks for it among the attributes of the object."""
        self.__dict__["dataset"] = value

    @property
    def batch_sampler(self) -> Any:
        """None, as of every loader of whole batches."""
        return _FromTheBeginning(self._epochs) if passing_over() else None

    @batch_sampler.setter
    def batch_sampler(self, value: Any) -> None:
        """torch's constructor sets one; the order is the data set's."""

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
        return self._epochs.epoch

    @property
    def remaining(self) -> int:
        """Batches left of the epoch that is under way."""
        return self._epochs.remaining

    def __len__(self) -> int:
        """Batches of this rank in an epoch, the same in mid-epoch.

        Of an epoch that was loaded: at least those that were given before and those that remain. With more ranks than before these are more
        than a whole epoch has, and a trainer that counts batches from the state (Lightning) would end it early.
        """
        whole = self._epochs.batches_per_epoch()
        run = self._run
        return max(whole, run.earlier + run.remaining) if run.earlier and run.epoch == self._epochs.epoch else whole

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; see :meth:`StreamingShardDataset.set_epoch`."""
        refuse_other_shape(sys._getframe(1))
        self._epochs.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, where torch has a class of its own
        dataset = self._epochs
        generation = dataset._place.begin().generation
        epoch, start = dataset._begin()
        begun = Begun(epoch, start, generation)
        reading = Reading(dataset, epoch, start)
        dataset._now = None
        earlier = self._run.earlier if self._run.epoch == epoch and start else 0
        self._run = replace(self._run, epoch=epoch, earlier=earlier, given=earlier)
        batches = self._through_workers(reading)
        if reading.batches == 0:  # a rank that has no row of the last global batch
            dataset._place.end(begun, 0)
        with under_way(self):
            for given, batch in enumerate(batches, start=1):
                if given == reading.batches:
                    dataset._place.end(begun, given)  # nobody may ever ask for one more
                    self.end_of_dataloader = True
                dataset._now = dataset.after(epoch, start, given)
                self._run = replace(self._run, given=earlier + given)
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
        work = _Work(self._epochs.transform)
        options = {name: getattr(self, name) for name in ("pin_memory", "generator", "pin_memory_device")}
        if self.num_workers and (self._epochs.transform is not None or self.collate_fn is not _as_it_is):
            options.update({name: getattr(self, name) for name in ("num_workers", *_OF_WORKERS)})
        return TorchDataLoader(work, batch_sampler=self._source, collate_fn=self.collate_fn, **options)

    def state_dict(self) -> State:
        """Where the trainer is: after the last batch it got, counted over all ranks. All ranks have the same; save one, of rank 0."""
        state = self._epochs.state_dict()
        return {**state, GIVEN: self._run.given if state["epoch"] == self._run.epoch and state["position"] else 0}

    def load_state_dict(self, state: State) -> None:
        """The next iteration goes on there; see :meth:`StreamingShardDataset.load_state_dict`."""
        self._epochs.load_state_dict(state)
        self._dealt.loaded = True
        goes_on = self._epochs._begin() == (state["epoch"], state["position"]) and state["position"] > 0
        given = int(state.get(GIVEN, 0)) if goes_on else 0
        self._run = _Run(int(state["epoch"]), given, self._epochs.remaining if goes_on else 0, given)


@dataclass(frozen=True)
class _Run:
    """Batches of the epoch that is under way, as this rank counts them."""

    epoch: int = -1
    earlier: int = 0
    """Given before the state was saved that this run goes on with."""
    remaining: int = 0
    """Left of the epoch where it was loaded."""
    given: int = 0
    """Given, the earlier ones included."""


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
            # numpy, which goes through the pipe to a worker in one piece: tensors would each be a file in shared memory
            yield from self.reading
        except Exception as error:  # noqa: BLE001  # whatever it is, it is raised in its turn
            self.error = error


class _FromTheBeginning(Sampler[Any]):
    """A whole epoch, for somebody who passes over batches of it: batches as "indices", as of :class:`_Source`."""

    def __init__(self, dataset: Epochs) -> None:
        self._epochs = dataset

    def set_epoch(self, epoch: int) -> None:
        self._epochs.set_epoch(epoch)

    def __len__(self) -> int:
        return self._epochs.batches_per_epoch()

    def __iter__(self) -> Iterator[Batch]:
        dataset = self._epochs
        epoch, start = dataset._begin()
        if start:
            raise ValueError(
                f"the loader goes on at row {start:,} of epoch {epoch}, where its state says, and Hugging Face's Trainer would pass over as many "
                "batches again: load no state into it (trainer.train(resume_from_checkpoint=...) is enough), or set ignore_data_skip=True"
            )
        begun = Begun(epoch, start, dataset._place.begin().generation)
        reading = Reading(dataset, epoch, start)
        for given, batch in enumerate(reading, start=1):
            if given == reading.batches:
                dataset._place.end(begun, given)
            yield batch


class _Work(TorchDataset[Any]):
    """What a worker does with a batch."""

    def __init__(self, transform: Callable[[Batch], Any] | None) -> None:
        self.transform = transform

    def __getitems__(self, batch: Batch) -> Any:
        tensors = batch.torch()
        return tensors if self.transform is None else self.transform(tensors)


class _Dealt(DistributedSampler[Any]):
    """Tells Lightning that the rows are dealt to the ranks already, and takes the epochs that it counts."""

    loaded = False
    """Whether a state was loaded that no epoch was set after."""
    _ahead = 0

    def __init__(self, dataset: Epochs) -> None:
        self._epochs = dataset

    def set_epoch(self, epoch: int) -> None:
        # Lightning falls behind by one where a run goes on twice from checkpoints of the last batch of an epoch: the state knows better
        if self.loaded:
            self.loaded, self._ahead = False, max(0, self._epochs.epoch - epoch)
        self._epochs.set_epoch(epoch + self._ahead)

    def __len__(self) -> int:
        return self._epochs.batches_per_epoch()

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "this sampler only says that rows are dealt to ranks already; iterate the stillhouse.torch.DataLoader"
        )
