"""The iterable data set: batches in the order of the epoch, read ahead by threads of the Rust core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from .. import _core
from ._epochs import Epochs, State


class StreamingShardDataset(Epochs, IterableDataset[Any]):
    """An iterable data set that gives whole batches: ``DataLoader(ds, batch_size=None, num_workers=K)``.

    ``dataset`` is a URL, a folder or what :func:`stillhouse.open` gave; ``columns`` leaves the others unread; ``batch_size`` is the
    number of rows of a batch of one rank. ``shuffle`` mixes: blocks of 65,536 tokens from all shards in random order,
    ``shuffle_blocks`` of them (rounded up to a multiple of 64) in the buffer whose rows are mixed; both keyed by ``seed`` and epoch. ``transform`` gets each
    :class:`~stillhouse.Batch` of tensors, in the worker.

    Memory of a process that iterates: the decoded blocks of up to two buffers, at most ``cache_megabytes``, and four batches. A cache that
    cannot hold one buffer is right too, but rows are then read one by one, at about a tenth of the speed: 128 blocks are 8.4 million tokens, about 20 bytes each
    with noise (40 where a teacher is unsure), some hundred more with a top-k of 64.

    Reading needs no worker processes (threads of the core read ahead); they help where the transform is slow.
    """

    # of a worker's copy: the iteration it is in, and where the next one begins, for its state_dict and load_state_dict
    _iterator: _Epoch | None = None
    _resumed: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Batches of this rank from the place where the next iteration begins to the end of its epoch."""
        return self.steps(*self._place.get()).own_batches

    def __iter__(self) -> Iterator[Any]:
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
        return {"worker": self.state_at(iterator.epoch, iterator.start), "ended": iterator.ended}

    def load_state_dict(self, state: State) -> None:
        if get_worker_info() is None:
            super().load_state_dict(state)
            return
        begun = state["worker"]
        self._check(begun)
        self.adopt(begun)
        if state["ended"]:
            self._place.set(begun["epoch"] + 1, 0)
        self._resumed = (int(begun["epoch"]), int(begun["position"]))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_iterator": None}


class _Epoch(Iterator[Any]):
    """One iteration of one worker, or of the only process."""

    def __init__(self, dataset: StreamingShardDataset) -> None:
        self.dataset = dataset
        worker = get_worker_info()
        self.worker, self.workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self.epoch, self.start = dataset._resumed or dataset._place.get()
        dataset._resumed = None
        self.given = 0
        self.ended = False
        self._stream: _core.Stream | None = None
        self._generation = dataset._place.begin()
        dataset._now = None
        if worker is not None:
            dataset._iterator = self  # for the worker's state_dict

    def __next__(self) -> Any:
        dataset = self.dataset
        if self.ended:
            raise StopIteration
        if self._stream is None:
            # past what was given out already: this worker's batches are every `workers`-th from `worker` on
            turn = self.worker + self.given * self.workers
            steps = dataset.steps(self.epoch, self.start)
            if turn >= steps.own_batches:
                return self._end()
            begin = dataset.after(self.epoch, self.start, turn)["position"]
            self._stream = dataset.steps(self.epoch, begin, 0, self.workers).stream()
        try:
            columns, position = next(self._stream)
        except StopIteration:
            return self._end()
        except BaseException:
            self._stream = None  # whoever asks again gets what was not given out, not an early end
            raise
        self.given += 1
        state = dataset.state_at(self.epoch, position)
        if self.workers == 1 and get_worker_info() is None:
            dataset._now = state
        return dataset.finish(dataset.dataset._batch(columns, state))

    def _end(self) -> Any:
        self.ended = True
        self._stream = None
        self.dataset._now = None
        self.dataset._place.end(self.epoch, self._generation)
        raise StopIteration

    def state_dict(self) -> State:
        """For StatefulDataLoader: this worker's part of the iteration."""
        return {
            "begun": self.dataset.state_at(self.epoch, self.start),
            "worker": self.worker,
            "workers": self.workers,
            "world_size": self.dataset.world_size,
            "batch_size": self.dataset.batch_size,
            "given": self.given,
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
        self.epoch, self.start = int(state["begun"]["epoch"]), int(state["begun"]["position"])
        self.given, self.ended, self._stream = int(state["given"]), bool(state["ended"]), None
