"""Epochs of a data set as numpy arrays: shuffled over many shards, dealt to trainers, resumed exactly; without torch.

::

    epochs = stillhouse.Epochs("s3://shards/owt-noise", batch_size=32, seed=1)
    while epochs.epoch < 10:
        for batch in epochs:                                  # stillhouse.Batch of numpy arrays [32, ...]
            ...
            save(epochs.state_dict())                         # or batch.state: plain numbers and strings

The order is that of :mod:`stillhouse.torch` for the same seed, epoch, rank and world size, and a state that one saves loads in the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, overload

from . import _core
from ._order import Order, Share, State, check_epoch, check_state, state_at, steps_of
from .batch import Batch, NumpyArray
from .dataset import Dataset, opened
from .place import GlobalBatch

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class EpochOptions(TypedDict, total=False):
    """Arguments of :class:`Epochs` that have a default."""

    split: str
    columns: Sequence[str] | None
    shuffle: bool
    seed: int
    shuffle_blocks: int
    rank: int
    world_size: int
    drop_last: bool | None
    storage: Mapping[str, Any] | None
    disk_cache: str | os.PathLike[str] | None
    disk_cache_gigabytes: float | None
    cache_megabytes: int


class Epochs(Generic[T]):
    """Batches of one epoch after the other. Iterating gives the rest of the epoch that was loaded, or else a whole one.

    ``dataset`` is a URL, a folder or what :func:`stillhouse.open` gave. Of ``world_size`` trainers, ``rank`` takes every ``world_size``-th
    row. ``shuffle`` mixes: blocks of 65,536 tokens from all shards in random order, ``shuffle_blocks`` of them (rounded up to a
    multiple of 64) in the buffer whose rows are mixed; both keyed by ``seed`` and epoch. The last batch of an epoch is shorter where
    the rows do not fill it, and trainers may differ by one row there. It is left out where it has fewer rows than there are trainers, so that all have
    as many batches; ``drop_last=True`` leaves it out wherever it is not full, ``False`` never. ``transform`` gets each :class:`~stillhouse.Batch` of numpy
    arrays and makes what is given out.

    An epoch ends, and the next one is begun by the next iteration, when its last batch is given out: whether the loop runs into the end or
    draws exactly ``len(epochs)`` batches. One that is left before begins anew. Threads of the core read ahead; memory is that of
    :class:`stillhouse.torch.StreamingShardDataset`. The object can be pickled; it goes on at its ``state_dict()``.
    """

    @overload
    def __init__(
        self: Epochs[Batch[NumpyArray]],
        dataset: Dataset | str | os.PathLike[str],
        *,
        batch_size: int,
        transform: None = None,
        **options: Unpack[EpochOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        *,
        batch_size: int,
        transform: Callable[[Batch[NumpyArray]], T],
        **options: Unpack[EpochOptions],
    ) -> None: ...
    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        *,
        batch_size: int,
        transform: Callable[[Batch[NumpyArray]], Any] | None = None,
        split: str = "train",
        columns: Sequence[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        shuffle_blocks: int = 128,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool | None = None,
        storage: Mapping[str, Any] | None = None,
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_gigabytes: float | None = None,
        cache_megabytes: int = 512,
    ) -> None:
        self.dataset = opened(
            dataset,
            split=split,
            columns=columns,
            storage=storage,
            cache_megabytes=cache_megabytes,
            disk_cache=disk_cache,
            disk_cache_gigabytes=disk_cache_gigabytes,
        )
        self.transform = transform
        self._order = Order(shuffle, seed, shuffle_blocks)
        self._share = Share(batch_size, rank, world_size, drop_last)
        if self._share.ended(0, len(self.dataset)):
            raise ValueError(
                f"batch_size: got {batch_size} for {world_size} trainer(s), drop_last {drop_last}, but {self.dataset.url} "
                f"({self.dataset.split}) has {len(self.dataset)} rows: no epoch has a batch"
            )
        self._begin = (0, 0)  # epoch and position of the next iteration
        self._given: State | None = None  # after the last batch given out
        self._newest: object = None  # the only iteration that moves the beginning of the next

    @property
    def batch_size(self) -> int:
        """Rows of a batch of one trainer."""
        return self._share.batch_size

    @property
    def rank(self) -> int:
        """This trainer's number."""
        return self._share.rank

    @property
    def world_size(self) -> int:
        """How many trainers there are."""
        return self._share.world_size

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or else the next one."""
        return self._begin[0]

    @property
    def remaining(self) -> int:
        """Batches that the next iteration gives: those of a whole epoch, or the rest of the one that was loaded."""
        return self._steps(*self._begin).own_batches

    def __len__(self) -> int:
        """Batches of this trainer in a whole epoch, wherever it is."""
        return self._steps(self._begin[0], 0).own_batches

    def __iter__(self) -> Iterator[T]:
        return _Epoch(self)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its beginning; or from the loaded place, where that is in this epoch."""
        check_epoch(epoch)
        if epoch != self.epoch:
            self._place(epoch, 0)

    def state_dict(self) -> State:
        """The place after the last batch given out, counted over all trainers: every one has the same. Plain numbers and strings."""
        return dict(self._given) if self._given is not None else self._state(*self._begin)

    def load_state_dict(self, state: State) -> None:
        """The next iteration goes on at this state: same order, next row, with the next epoch where this one has ended.

        World size and batch size may be others. Raises ``ValueError`` for the state of another data set or split.
        """
        check_state(self.dataset, state)
        self._order = Order.of_state(state)
        epoch, position = int(state["epoch"]), int(state["position"])
        ended = self._share.ended(position, len(self.dataset))
        self._place(*((epoch + 1, 0) if ended else (epoch, position)))

    def _place(self, epoch: int, position: int) -> None:
        self._begin, self._given, self._newest = (epoch, position), None, None

    def _state(self, epoch: int, position: int) -> State:
        return state_at(self.dataset, self._order, epoch, position)

    def _steps(self, epoch: int, position: int) -> _core.Steps:
        return steps_of(self.dataset, self._order, self._share, epoch, position)

    def _place_of(self, epoch: int, start: int, end: int) -> GlobalBatch:
        """The global batch that ends at a position, in an iteration that began at ``start``."""
        size = self.batch_size * self.world_size
        begin = start + (end - start - 1) // size * size
        return GlobalBatch(epoch, begin, end - begin, self.rank, self.world_size)

    def _finish(self, batch: Batch[NumpyArray]) -> Any:
        return batch if self.transform is None else self.transform(batch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_newest": None}


class _Epoch(Iterator[T]):
    """One iteration: the batches of an epoch, or of the rest of it."""

    def __init__(self, epochs: Epochs[T]) -> None:
        self.epochs = epochs
        self.epoch, self.start = epochs._begin
        self.position = self.start
        self.left = epochs.remaining
        self._stream: _core.Stream | None = None
        epochs._newest, epochs._given = self, None

    def __next__(self) -> T:
        if not self.left:
            self._move(self.epoch + 1)  # for a trainer that has no batch in the rest of an epoch (drop_last=False)
            raise StopIteration
        epochs = self.epochs
        if self._stream is None:
            self._stream = epochs._steps(self.epoch, self.position).stream()
        try:
            columns, position = next(self._stream)
            batch = epochs.dataset._batch(columns, epochs._state(self.epoch, position))
            batch.global_batch = epochs._place_of(self.epoch, self.start, position)
            made: T = epochs._finish(batch)
        except BaseException:
            self._stream = None  # whoever asks again gets what was not given out, not an early end
            raise
        self.position = position
        self.left -= 1
        if epochs._newest is self:
            epochs._given = batch.state
        if not self.left:
            self._stream = None
            self._move(self.epoch + 1)
        return made

    def _move(self, epoch: int) -> None:
        if self.epochs._newest is self:
            self.epochs._place(epoch, 0)
