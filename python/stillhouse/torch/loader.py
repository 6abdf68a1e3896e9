"""A DataLoader that counts the batches it gives out.

Its state loads at any world size and number of workers, and it decodes every shard once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import DistributedSampler, Sampler

from .._epochs_base import GIVEN, State
from .._reading import Reading
from ..batch import Batch
from ._accelerate import under_way
from ._callers import passing_over, refuse_other_shape
from ._epochs import Epochs, EpochSampler, finish
from .map import ShardDataset
from .streaming import StreamingShardDataset

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
_OF_WORKERS = ("persistent_workers", "prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")


class DataLoader(TorchDataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` over a :class:`StreamingShardDataset` or :class:`ShardDataset`.

    It takes the arguments of torch's, without those that the data set decides (batch size, shuffle, samplers,
    ``drop_last``). Iterating gives the rest of the epoch that was loaded, or else the next epoch. An epoch ends when
    its last batch is given out.

    Threads of this process read, whatever ``num_workers`` is, so no block is decoded twice. The worker processes run
    the data set's ``transform`` and ``collate_fn``. Without either, no worker starts.

    Lightning, accelerate and Hugging Face's Trainer take it as it is. The data set shares the rows among the ranks, and
    each framework finds ``set_epoch``, ``state_dict`` and ``load_state_dict`` where it looks for them.
    ``accelerator.prepare`` returns it unchanged, and ``accelerator.save_state`` saves its state. Move batches by
    ``batch.to(accelerator.device)``.
    """

    # accelerate's attributes: do not share the rows among processes, save the state, and the end of an epoch
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
            raise TypeError(
                "in_order: got False, valid: True, because the state is a position in the order of the epoch"
            )
        self._epochs = dataset
        self._dealt = _Dealt(dataset)
        self._inner: TorchDataLoader[Any] | None = None
        self._source = _Source()
        self._run = _Run()
        # the default of batch_size=None would convert the batch to tensors once more
        kwargs.setdefault("collate_fn", _as_it_is)
        super().__init__(dataset, batch_size=None, **kwargs)

    @property  # type: ignore[override]  # an attribute in torch's
    def dataset(self) -> StreamingShardDataset | ShardDataset:
        """The data set; its transform alone for Hugging Face's Trainer when it passes over batches to resume."""
        return _Work(self._epochs.transform) if passing_over() else self._epochs  # type: ignore[return-value]

    @dataset.setter
    def dataset(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """torch's constructor sets it; Lightning looks for it in the object's ``__dict__``."""
        self.__dict__["dataset"] = value

    @property
    def batch_sampler(self) -> Any:
        """None, as in every loader of whole batches."""
        return _FromTheBeginning(self._epochs) if passing_over() else None

    @batch_sampler.setter
    def batch_sampler(self, value: Any) -> None:
        """torch's constructor sets one; the order is the data set's."""

    @property  # type: ignore[override]  # an attribute in torch's
    def sampler(self) -> DistributedSampler[Any]:
        """Lightning calls its ``set_epoch``, and does not replace it because it is a DistributedSampler."""
        return self._dealt

    @sampler.setter
    def sampler(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """torch's constructor sets one; the order is the data set's."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch: after the last batch of an epoch, the next one."""
        return self._epochs.epoch

    @property
    def remaining(self) -> int:
        """Batches left of the current epoch."""
        return self._epochs.remaining

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch, the same in mid-epoch.

        In a loaded epoch, at least the batches given before plus those that remain. With more ranks than before, these
        are more than a whole epoch has, and a trainer that counts batches from the state (Lightning) would end it
        early.
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
        begun = dataset.begin_iteration()
        epoch, start = begun.epoch, begun.position
        reading = Reading(dataset, epoch, start)
        dataset._last_state = None
        earlier = self._run.earlier if self._run.epoch == epoch and start else 0
        self._run = replace(self._run, epoch=epoch, earlier=earlier, given=earlier)
        batches = self._through_workers(reading)
        if reading.batches == 0:  # with drop_last=False, a rank may have no batch in the rest of an epoch
            dataset._place.end(begun, 0)
        with under_way(self):
            for given, batch in enumerate(batches, start=1):
                if given == reading.batches:
                    dataset._place.end(begun, given)  # the caller may never ask for one more
                    self.end_of_dataloader = True
                dataset._last_state = dataset.after(epoch, start, given)
                self._run = replace(self._run, given=earlier + given)
                yield batch
        dataset._last_state = None

    def _through_workers(self, reading: Reading) -> Iterator[Any]:
        """The batches, transformed and collated: in this process, or in the workers."""
        loader = self._loader_of_workers() if self._inner is None else self._inner  # not `or`: loaders have a length
        if loader.persistent_workers:
            self._inner = loader
        self._source.reading = reading
        yield from loader
        if self._source.error is not None:
            raise self._source.error

    def _loader_of_workers(self) -> TorchDataLoader[Any]:
        """torch's own loader with batches as its indices: this process reads them and sends them to the workers."""
        work = _Work(self._epochs.transform)
        options = {name: getattr(self, name) for name in ("pin_memory", "generator", "pin_memory_device")}
        if self.num_workers and (self._epochs.transform is not None or self.collate_fn is not _as_it_is):
            options.update({name: getattr(self, name) for name in ("num_workers", *_OF_WORKERS)})
        return TorchDataLoader(work, batch_sampler=self._source, collate_fn=self.collate_fn, **options)

    def state_dict(self) -> State:
        """The place after the last batch given out. All ranks have the same; save that of rank 0."""
        state = self._epochs.state_dict()
        return {**state, GIVEN: self._run.given if state["epoch"] == self._run.epoch and state["position"] else 0}

    def load_state_dict(self, state: State) -> None:
        """The next iteration goes on at this state; see :meth:`StreamingShardDataset.load_state_dict`."""
        self._epochs.load_state_dict(state)
        self._dealt.loaded = True
        goes_on = self._epochs._begin() == (state["epoch"], state["position"]) and state["position"] > 0
        given = int(state.get(GIVEN, 0)) if goes_on else 0
        self._run = _Run(int(state["epoch"]), given, self._epochs.remaining if goes_on else 0, given)


@dataclass(frozen=True)
class _Run:
    """Batches of the current epoch, as this rank counts them."""

    epoch: int = -1
    earlier: int = 0
    """Given before the loaded state was saved."""
    remaining: int = 0
    """Left of the epoch when the state was loaded."""
    given: int = 0
    """Given, the earlier ones included."""


def _as_it_is(batch: Any) -> Any:
    """The ``collate_fn`` of batches that need none."""
    return batch


class _Source(Sampler[Any]):
    """Passes batches to torch's loader. It keeps an error until the batches before it are given out."""

    reading: Reading
    error: BaseException | None = None

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[Batch]:
        self.error = None
        try:
            # numpy arrays go through the pipe to a worker in one piece; each tensor would be a file in shared memory
            yield from self.reading
        except Exception as error:  # noqa: BLE001  # the loader raises it after the batches before it
            self.error = error


class _FromTheBeginning(EpochSampler):
    """A whole epoch of batches as indices (like :class:`_Source`), for Hugging Face's Trainer that passes over some."""

    def __iter__(self) -> Iterator[Batch]:
        dataset = self.dataset
        begun = dataset.begin_iteration()
        if begun.position:
            raise ValueError(
                f"the loader's state is row {begun.position:,} of epoch {begun.epoch}, but Hugging Face's Trainer "
                "would skip as many batches again: load no state into the loader "
                "(trainer.train(resume_from_checkpoint=...) is enough), or set ignore_data_skip=True"
            )
        reading = Reading(dataset, begun.epoch, begun.position)
        for given, batch in enumerate(reading, start=1):
            if given == reading.batches:
                dataset._place.end(begun, given)
            yield batch


class _Work(TorchDataset[Any]):
    """The work on a batch, in a worker."""

    def __init__(self, transform: Callable[[Batch], Any] | None) -> None:
        self.transform = transform

    def __getitems__(self, batch: Batch) -> Any:
        return finish(batch, self.transform)


class _Dealt(DistributedSampler[Any]):
    """Takes the epochs that Lightning counts, and as a DistributedSampler keeps Lightning from adding its own."""

    loaded = False
    """Whether a state was loaded since the last ``set_epoch``."""
    _ahead = 0

    def __init__(self, dataset: Epochs) -> None:
        self._epochs = dataset

    def set_epoch(self, epoch: int) -> None:
        # Lightning counts one epoch too few after two resumes from checkpoints of the last batch of an epoch
        if self.loaded:
            self.loaded, self._ahead = False, max(0, self._epochs.epoch - epoch)
        self._epochs.set_epoch(epoch + self._ahead)

    def __len__(self) -> int:
        return self._epochs.batches_per_epoch()

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "this sampler has no rows: the data set shares them among the ranks; iterate stillhouse.torch.DataLoader"
        )
