"""The iterable data set: batches in the order of the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from .._order import State
from ._callers import refuse_batching_again
from ._epochs import Epochs
from ._place import Begun
from ._reading import Reading


class StreamingShardDataset(Epochs, IterableDataset[Any]):
    """An iterable data set that gives whole batches, for :class:`stillhouse.torch.DataLoader` or ``torch.utils.data.DataLoader(ds, batch_size=None)``.

    ``dataset`` is a URL, a folder or what :func:`stillhouse.open` gave; ``columns`` leaves the others unread; ``batch_size`` is the
    number of rows of a batch of one rank. ``shuffle`` mixes: blocks of 65,536 tokens from all shards in random order,
    ``shuffle_blocks`` of them (rounded up to a multiple of 64) in the buffer whose rows are mixed; both keyed by ``seed`` and epoch. ``transform`` gets each
    :class:`~stillhouse.Batch` of tensors, in the worker.

    ``evaluation=True`` is for validation: views draw the masks and times of epoch 0 in every pass, so that losses of different passes are of the same examples
    (the order stays that of ``shuffle``, which is False there as a rule). By default every epoch has its own.

    ``drop_last`` says what becomes of the last global batch (``world_size × batch_size`` rows) where the rows do not fill it. None, the
    default: it is given out, smaller, unless some rank would get nothing of it; so all ranks take equally many batches, as
    training in step needs, and fewer than ``world_size`` rows of an epoch are left out. True: it is always left out. False: never; ranks may
    then differ by one batch.

    Memory of a process that iterates: the decoded blocks of up to two buffers, at most ``cache_megabytes``, and four batches. A cache that
    cannot hold one buffer is right too, but rows are then read one by one, at about a tenth of the speed: 128 blocks are 8.4 million tokens, about 20 bytes each
    with noise (40 where a teacher is unsure), some hundred more with a top-k of 64.

    Under torch's own loader every worker process decodes what its batches need, which is nearly everything: read without workers there
    (threads of the core read ahead), or use :class:`stillhouse.torch.DataLoader`, whose workers run the transform alone.
    """

    # of a worker's copy: the iteration it is in, and where the next one begins, for its state_dict and load_state_dict
    _iterator: _Epoch | None = None
    _resumed: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Batches of this rank in an epoch. (``remaining`` says how many are left of the one that is under way.)"""
        return self.batches_per_epoch()

    def __iter__(self) -> Iterator[Any]:
        refuse_batching_again()
        # the place is read now, not at the first batch: a generator would look when other workers may have ended the epoch
        return _Epoch(self)

    # state_dict and load_state_dict of a worker's copy are those of torchdata's StatefulDataLoader: each worker has its own

    def state_dict(self) -> State:
        worker = get_worker_info()
        if worker is None:
            return super().state_dict()
        iterator = self._iterator
        if iterator is None:
            return {"worker": self.state_at(*self._place.get()), "ended": False}
        return {"worker": self.state_at(iterator.reading.epoch, iterator.reading.start), "ended": iterator.ended}

    def load_state_dict(self, state: State) -> None:
        if get_worker_info() is None:
            super().load_state_dict(state)
            return
        begun = state["worker"]
        self._check(begun)
        self.adopt(begun)
        following = (begun["epoch"] + 1, 0)
        if state["ended"] and self._place.get() != following:
            self._place.set(*following)
        self._resumed = (int(begun["epoch"]), int(begun["position"]))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_iterator": None}


class _Epoch(Iterator[Any]):
    """One iteration of one worker, or of the only process."""

    def __init__(self, dataset: StreamingShardDataset) -> None:
        self.dataset = dataset
        begun = dataset._place.begin()
        epoch, start = dataset._resumed or dataset._normal(begun.epoch, begun.position)
        dataset._resumed = None
        dataset._now = None
        self._generation = begun.generation
        self._go(epoch, start)
        if get_worker_info() is not None:
            dataset._iterator = self  # for the worker's state_dict

    def _go(self, epoch: int, start: int) -> None:
        worker = get_worker_info()
        share = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self.reading = Reading(self.dataset, epoch, start, *share)
        self.ended = self._moved = False
        self._begun = Begun(epoch, start, self._generation)
        self.dataset._place.join(self._begun)

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        batch = next(self.reading, None)
        if batch is None:
            self.ended = True
            self._move_on()
            self.dataset._now = None
            raise StopIteration
        if get_worker_info() is None:
            self.dataset._now = batch.state
        finished = self.dataset.finish(batch)
        if not self.reading.left:
            self._move_on()  # nobody may ever ask for one more
        return finished

    def _move_on(self) -> None:
        if not self._moved:
            self.dataset._place.end(self._begun, self.reading.batches)
        self._moved = True

    def state_dict(self) -> State:
        """For StatefulDataLoader: this worker's part of the iteration."""
        return {
            "begun": self.dataset.state_at(self.reading.epoch, self.reading.start),
            "worker": self.reading.worker,
            "workers": self.reading.workers,
            "world_size": self.dataset.world_size,
            "batch_size": self.dataset.batch_size,
            "given": self.reading.given,
            "ended": self.ended,
        }

    def load_state_dict(self, state: State) -> None:
        dataset = self.dataset
        here = self.state_dict()
        for key in ("worker", "workers", "world_size", "batch_size"):
            if state[key] != here[key]:
                raise ValueError(
                    f"state: got {key} {state[key]}, this iteration has {here[key]}: the state of a StatefulDataLoader resumes in the "
                    "same shape only; to change it, save batch.state and load that into the data set"
                )
        dataset._check(state["begun"])
        dataset.adopt(state["begun"])
        self._go(int(state["begun"]["epoch"]), int(state["begun"]["position"]))
        self.reading.given, self.ended = int(state["given"]), bool(state["ended"])
