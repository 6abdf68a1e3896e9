"""Epochs of a data set as numpy arrays: shuffled over many shards, shared among ranks, resumed exactly; without torch.

::

    epochs = stillhouse.Epochs("s3://shards/owt-noise", batch_size=32, seed=1)
    while epochs.epoch < 10:
        for batch in epochs:                                  # stillhouse.Batch of numpy arrays [32, ...]
            ...
            save(epochs.state_dict())                         # or batch.state: plain numbers and strings

For the same seed, epoch, rank and world size, the order is that of :mod:`stillhouse.torch`. Each loads the states of
the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ._epochs_base import EpochsBase, OrderOptions, State, check_epoch
from ._order import Order, Share
from ._reading import Reading
from .batch import Batch, NumpyArray
from .dataset import Dataset, OpenOptions, opened

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class EpochOptions(OrderOptions, total=False):
    """Optional arguments of :class:`Epochs`."""

    rank: int
    world_size: int


class Epochs(EpochsBase, Generic[T]):
    """Batches of one epoch after the other. Iterating gives the rest of the epoch that was loaded, or else a whole one.

    - ``dataset`` is a URL, a folder or the result of :func:`stillhouse.open`. The other options of
      :func:`stillhouse.open` are valid for a URL or folder.
    - Of ``world_size`` ranks, ``rank`` takes every ``world_size``-th row.
    - ``shuffle`` mixes the rows: blocks of 65,536 tokens from all shards come in random order, and rows are mixed in a
      buffer of ``shuffle_blocks`` of them (rounded up to a multiple of 64). ``seed`` and epoch key both.
    - ``transform`` gets each :class:`~stillhouse.Batch` of numpy arrays; iterating gives its result.
    - ``drop_last`` decides about the last batch of an epoch where the rows do not fill it. None, the default, gives it
      out shorter, with up to one row fewer in some ranks. But a last batch of fewer rows than ranks is left out, so
      that all ranks have equally many batches. True leaves it out wherever it is not full, False never.

    An epoch ends when its last batch is given out, and the next iteration begins the next epoch. This holds for a loop
    to the end and for one that draws exactly ``len(epochs)`` batches. The next iteration begins an epoch again that a loop left early.

    Threads of the core read ahead; :class:`stillhouse.torch.StreamingShardDataset` says how much memory they need. The
    object can be pickled; it goes on at its ``state_dict()``.
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
        shuffle: bool = True,
        seed: int = 0,
        shuffle_blocks: int = 128,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool | None = None,
        **opening: Unpack[OpenOptions],
    ) -> None:
        self.dataset = opened(dataset, **opening)
        self.transform = transform
        self._order = Order(shuffle, seed, shuffle_blocks)
        self._share = Share(batch_size, rank, world_size, drop_last)
        self.refuse_empty()
        self._begin = (0, 0)  # epoch and position of the next iteration
        self._last_state = None
        self._newest: object = None  # the only iteration that moves the beginning of the next

    @property
    def batch_size(self) -> int:
        """Rows of a batch of one rank."""
        return self._share.batch_size

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._share.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._share.world_size

    @property
    def epoch(self) -> int:
        """The current epoch, or else the next one."""
        return self._begin[0]

    @property
    def remaining(self) -> int:
        """Batches of the next iteration: those of a whole epoch, or of the rest of the one that was loaded."""
        return self.steps(*self._begin).own_batches

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch, the same in mid-epoch."""
        return self.batches_per_epoch()

    def __iter__(self) -> Iterator[T]:
        return _Epoch(self)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch: from the loaded place if that is in this epoch, else from its beginning."""
        check_epoch(epoch)
        if epoch != self.epoch:
            self._set_begin(epoch, 0)

    def state_dict(self) -> State:
        """The place after the last batch given out, the same in all ranks. Plain numbers and strings."""
        return dict(self._last_state) if self._last_state is not None else self.state_at(*self._begin)

    def load_state_dict(self, state: State) -> None:
        """The next iteration goes on at this state: same order, next row. After the end of an epoch, the next one.

        World size and batch size may differ. Raises ``ValueError`` for the state of another data set or split.
        """
        self._check(state)
        self._order = Order.of_state(state)
        self._set_begin(*self._normal(int(state["epoch"]), int(state["position"])))

    def _set_begin(self, epoch: int, position: int) -> None:
        self._begin, self._last_state, self._newest = (epoch, position), None, None

    def _finish(self, batch: Batch[NumpyArray]) -> Any:
        return batch if self.transform is None else self.transform(batch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_newest": None}


class _Epoch(Iterator[T]):
    """One iteration: the batches of an epoch, or of the rest of it."""

    def __init__(self, epochs: Epochs[T]) -> None:
        self._epochs = epochs
        self._reading = Reading(epochs, *epochs._begin)
        epochs._newest, epochs._last_state = self, None

    def __next__(self) -> T:
        epochs, reading = self._epochs, self._reading
        if not reading.left:
            self._end()  # with drop_last=False, a rank may have no batch in the rest of an epoch
            raise StopIteration
        given = reading.given
        try:
            batch = next(reading)
            made: T = epochs._finish(batch)
        except BaseException:
            reading.go_on_after(given)  # after an error in `transform`, the next call gives the same batch
            raise
        if epochs._newest is self:
            epochs._last_state = batch.state
        if not reading.left:
            self._end()
        return made

    def _end(self) -> None:
        if self._epochs._newest is self:
            self._epochs._set_begin(self._reading.epoch + 1, 0)
