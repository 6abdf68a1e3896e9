"""What the data sets for PyTorch have in common: their ranks, and the place where the next epoch begins."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.utils.data import Sampler

from .._epochs_base import EpochsBase, OrderOptions, State, check_epoch, explicit_ranks
from .._order import Order, Share
from ..batch import Batch
from ..dataset import Dataset, OpenOptions, opened
from ..place import GlobalBatch
from ._callers import refuse_accelerate, refuse_counting_anew
from ._place import Begun, Place

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EpochOptions(OrderOptions, total=False):
    """Optional arguments of every data set for PyTorch."""

    rank: int | None
    world_size: int | None
    transform: Callable[[Batch], Any] | None


class Epochs(EpochsBase):
    """The base of :class:`ShardDataset` and :class:`StreamingShardDataset`."""

    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        shuffle_blocks: int = 128,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool | None = None,
        transform: Callable[[Batch], Any] | None = None,
        evaluation: bool = False,
        **opening: Unpack[OpenOptions],
    ) -> None:
        self._open(dataset, **opening)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.transform = transform
        self.evaluation = evaluation
        self._given_ranks = explicit_ranks(rank, world_size)
        Share(batch_size, *(self._given_ranks or (0, 1)))  # raises ValueError for what is invalid
        self._place = Place(Order(shuffle, seed, shuffle_blocks))
        self._last_state = None

    def _open(self, dataset: Any, **opening: Unpack[OpenOptions]) -> None:
        self.dataset = opened(dataset, **opening)

    @property
    def rank(self) -> int:
        """This rank's number: the argument, or else that of ``torch.distributed``, or else 0."""
        return self._ranks()[0]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._ranks()[1]

    def _ranks(self) -> tuple[int, int]:
        if self._given_ranks is not None:
            return self._given_ranks
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    @property
    def _share(self) -> Share:  # type: ignore[override]  # the process group may start after the data set was made
        return Share(self.batch_size, *self._ranks(), self.drop_last)

    @property
    def _order(self) -> Order:
        return self._place.order()

    @_order.setter
    def _order(self, order: Order) -> None:
        self._place.set_order(order)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch: after the last batch of an epoch, the next one."""
        return self._begin()[0]

    @property
    def remaining(self) -> int:
        """Batches of this rank until the end of the current epoch; those of a whole epoch between two epochs."""
        state = Epochs.state_dict(self)  # in a worker, that of a stream has other keys
        return self.steps(*self._normal(int(state["epoch"]), int(state["position"]))).own_batches

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch: from the loaded place if that is in this epoch, else from its beginning.

        A loop that iterates every epoch to its last batch does not need it: the next epoch follows. An epoch that a
        loop leaves early begins anew at the next iteration.

        torch's own DataLoader with workers or a sampler asks for the last batch of an epoch a few batches early, and
        the epoch counts as ended then. If you leave epochs early there, call this before each iteration.

        Warns if it discards a loaded place, because the rest of that epoch is then left out.
        """
        check_epoch(epoch)
        refuse_accelerate()
        current, position = self._begin()
        if epoch == current:
            return
        refuse_counting_anew(epoch, current)
        if position > 0:
            warnings.warn(
                f"set_epoch({epoch}): discards the loaded state, row {position:,} of {len(self.dataset):,} of epoch "
                f"{current}, and leaves out the other rows of that epoch; a trainer that resumes must continue its "
                "count of epochs from there",
                stacklevel=2,
            )
        self._place.set(epoch, 0)
        self._last_state = None

    def state_dict(self) -> State:
        """The place after the last batch given out, counted over all ranks. Plain numbers and strings.

        It is exact without worker processes and under :class:`stillhouse.torch.DataLoader`. Under another loader with
        workers, this process does not know which batches were given out: save ``batch.state`` of the last batch, or the
        loader's own state.
        """
        return dict(self._last_state) if self._last_state is not None else self.state_at(*self._place.get())

    def load_state_dict(self, state: State) -> None:
        """The next iteration goes on at this state: same order, next row.

        World size, batch size and workers may differ.

        After a state of the end of an epoch, the next epoch follows. Raises ``ValueError`` for the state of another
        data set or split.
        """
        self._check(state)
        self._order = Order.of_state(state)  # pyright: ignore[reportIncompatibleVariableOverride]
        self._place.set(int(state["epoch"]), int(state["position"]))
        self._last_state = None

    def _begin(self) -> tuple[int, int]:
        """Epoch and position of the next iteration."""
        return self._normal(*self._place.get())

    def begin_iteration(self) -> Begun:
        """The iteration that this process, a worker or the only one, begins now."""
        begun = self._place.begin()
        epoch, position = self._normal(begun.epoch, begun.position)
        return replace(begun, epoch=epoch, position=position)

    def global_batch(self, epoch: int, start: int, end: int) -> GlobalBatch | None:
        """The global batch that ends at a position, in an iteration that began at ``start``."""
        return super().global_batch(0 if self.evaluation else epoch, start, end)

    def __getstate__(self) -> dict[str, Any]:
        # a spawned worker has no process group, so it gets the ranks of this one; a spawned trainer may start its own
        known = torch.distributed.is_available() and torch.distributed.is_initialized()
        return {**self.__dict__, "_given_ranks": self._ranks() if known else self._given_ranks}


class EpochSampler(Sampler[Any]):
    """A sampler of the epochs of a data set."""

    def __init__(self, dataset: Epochs) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self.dataset.batches_per_epoch()

    def set_epoch(self, epoch: int) -> None:
        """``set_epoch`` of the data set."""
        self.dataset.set_epoch(epoch)


def finish(batch: Batch, transform: Callable[[Batch], Any] | None) -> Any:
    """A batch as tensors, through the transform."""
    tensors = batch.torch()
    return tensors if transform is None else transform(tensors)
