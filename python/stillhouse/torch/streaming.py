"""The iterable data set: batches in the order of the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from .._epochs_base import State
from .._order import Order
from .._reading import Reading
from ._callers import refuse_batching_again
from ._epochs import Epochs, finish
from ._place import Begun


class StreamingShardDataset(Epochs, IterableDataset[Any]):
    """An iterable data set of whole batches.

    Its loader is :class:`stillhouse.torch.DataLoader`, or ``torch.utils.data.DataLoader(ds, batch_size=None)``.

    - ``dataset`` is a URL, a folder or the result of :func:`stillhouse.open`. The other options of
      :func:`stillhouse.open` are valid for a URL or folder.
    - ``batch_size`` is the number of rows of a batch of one rank. ``rank`` and ``world_size`` are by default those of
      ``torch.distributed``.
    - ``shuffle`` mixes the rows: blocks of 65,536 tokens from all shards come in random order, and rows are mixed in a
      buffer of ``shuffle_blocks`` of them (rounded up to a multiple of 64). ``seed`` and epoch key both.
    - ``transform`` gets each :class:`~stillhouse.Batch` of tensors, in the worker.
    - ``evaluation=True`` is for validation: in every pass, views draw the masks and times of epoch 0, so losses of
      different passes are of the same examples. (``shuffle``, usually False there, still decides the order.)
    - ``drop_last`` decides about the last global batch (``world_size × batch_size`` rows) where the rows do not fill
      it:

      - None, the default, gives it out smaller, unless it has fewer rows than there are ranks. So all ranks take
        equally many batches, and fewer than ``world_size`` rows of an epoch are left out.
      - True always leaves it out.
      - False never does; ranks may then differ by one batch.

    Memory of a process that iterates: the decoded blocks of up to two buffers, at most ``cache_megabytes``, and four
    batches. 128 blocks are 8.4 million tokens, with noise of about 20 bytes each (40 where a teacher is unsure), and
    some hundred bytes more with a top-k of 64. A cache smaller than one buffer gives the same rows, read one by one at
    about a tenth of the speed.

    Every worker process of torch's own loader decodes the blocks of its batches, which are nearly all blocks. So read
    without workers there (threads of the core read ahead), or use :class:`stillhouse.torch.DataLoader`, whose workers
    run only the transform.
    """

    # in a worker's copy: its current iteration, and the beginning of the next one after a load
    _iterator: _Epoch | None = None
    _resumed: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch. (``remaining`` counts those left of the current one.)"""
        return self.batches_per_epoch()

    def __iter__(self) -> Iterator[Any]:
        refuse_batching_again()
        # not a generator: that would read the place at its first batch, when other workers may have ended the epoch
        return _Epoch(self)

    # torchdata's StatefulDataLoader calls these two in each worker, for a state of that worker

    def state_dict(self) -> State:
        if get_worker_info() is None:
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
        self._order = Order.of_state(begun)
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
        begun = dataset.begin_iteration()
        if dataset._resumed is not None:
            epoch, position = dataset._resumed
            begun = replace(begun, epoch=epoch, position=position)
        dataset._resumed = None
        dataset._last_state = None
        self._go(begun)
        if get_worker_info() is not None:
            dataset._iterator = self  # for the worker's state_dict

    def _go(self, begun: Begun) -> None:
        worker = get_worker_info()
        worker_and_count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self.reading = Reading(self.dataset, begun.epoch, begun.position, *worker_and_count)
        self.ended = self._moved = False
        self._begun = begun
        self.dataset._place.join(begun)

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        batch = next(self.reading, None)
        if batch is None:
            self.ended = True
            self._move_on()
            self.dataset._last_state = None
            raise StopIteration
        if get_worker_info() is None:
            self.dataset._last_state = batch.state
        finished = finish(batch, self.dataset.transform)
        if not self.reading.left:
            self._move_on()  # the caller may never ask for one more
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
        current = self.state_dict()
        for key in ("worker", "workers", "world_size", "batch_size"):
            if state[key] != current[key]:
                raise ValueError(
                    f"state: got {key} {state[key]}, this iteration has {current[key]}: the state of a "
                    "StatefulDataLoader loads only in the same shape; to change the shape, save batch.state and load "
                    "that into the data set"
                )
        begun = state["begun"]
        dataset._check(begun)
        dataset._order = Order.of_state(begun)
        self._go(replace(self._begun, epoch=int(begun["epoch"]), position=int(begun["position"])))
        self.reading.go_on_after(int(state["given"]))
        self.ended = bool(state["ended"])
