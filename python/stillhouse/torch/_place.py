"""The place where the next iteration begins, in memory that worker processes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import get_worker_info

from .._order import Order

if TYPE_CHECKING:
    from torch.utils.data._utils.worker import WorkerInfo

_MOST_WORKERS = 1024


@dataclass(frozen=True)
class Begun:
    """An iteration: where it began, and the generation of the place then."""

    epoch: int
    position: int
    generation: int


class Place:
    """The order, and the epoch and position at which the next iteration begins.

    Worker processes of torch's loaders keep their copy of the data set from epoch to epoch, so the place is in shared
    memory. Frameworks draw ``len(loader)`` batches and never ask for one more, so no call tells a worker that an epoch
    is over. Therefore each worker marks its last batch. The worker that finds the marks of all workers with batches
    moves the place on. Two races are excluded:

    - A worker of an abandoned iteration must not move a place that was set in the meantime. Marks belong to one
      *generation* of the place, and every ``set`` begins a new one.
    - A worker without a batch may begin so late that its own iteration has moved the place, and must not give rows of
      the next epoch. Whoever moves the place records the iteration that ended, and a late worker joins that one.
    """

    _HEAD = 11
    _EPOCH, _POSITION, _SHUFFLE, _SEED, _BLOCKS, _GENERATION = range(6)
    # of the iteration that ended last: its base seed, epoch, position, generation, and number of workers with batches
    _ENDED = slice(6, 11)

    def __init__(self, order: Order) -> None:
        # after the head, four cells of each worker: its iteration (base seed, epoch, generation) and its mark
        cells = torch.zeros(self._HEAD + 4 * _MOST_WORKERS, dtype=torch.int64)
        self._cells = cells.share_memory_()  # type: ignore[no-untyped-call]
        self._cells[self._ENDED] = -1
        self.set_order(order)

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        copied = Place(self.order())
        copied._cells.copy_(self._cells)
        return copied

    def get(self) -> tuple[int, int]:
        """(epoch, position)."""
        epoch, position = self._cells[:2].tolist()
        return epoch, position

    def set(self, epoch: int, position: int) -> None:
        """The next iteration begins at this place."""
        self._cells[self._GENERATION] += 1
        self._cells[self._POSITION] = position
        self._cells[self._EPOCH] = epoch

    def order(self) -> Order:
        """The order."""
        shuffle, seed, shuffle_blocks = self._cells[self._SHUFFLE : self._BLOCKS + 1].tolist()
        return Order(bool(shuffle), seed % (1 << 64), shuffle_blocks)

    def set_order(self, order: Order) -> None:
        """Sets the order from the next iteration on."""
        seed = order.seed - (1 << 64) if order.seed >= 1 << 63 else order.seed
        self._cells[self._SHUFFLE : self._BLOCKS + 1] = torch.tensor([int(order.shuffle), seed, order.shuffle_blocks])

    def begin(self) -> Begun:
        """The iteration that this process, a worker or the only one, begins now."""
        begun = Begun(*self.get(), int(self._cells[self._GENERATION]))
        worker = get_worker_info()
        if worker is None:
            return begun
        base = _base_seed(worker)
        mine = self._of_worker(worker.id)
        of, epoch, position, generation, busy = self._cells[self._ENDED].tolist()
        took_part = mine[:3].tolist() == [base, epoch, generation]
        if of == base and not took_part and worker.id >= busy:
            begun = Begun(epoch, position, generation)
        return begun

    def join(self, begun: Begun) -> None:
        """Records that this worker takes part in an iteration."""
        worker = get_worker_info()
        if worker is not None:
            self._of_worker(worker.id)[:] = torch.tensor([_base_seed(worker), begun.epoch, begun.generation, -1])

    def end(self, begun: Begun, batches: int) -> None:
        """Records that this process gave its last batch of an iteration with ``batches`` batches over all workers."""
        worker = get_worker_info()
        ended: list[int] = []
        if worker is not None:
            base = _base_seed(worker)
            busy = max(1, min(worker.num_workers, batches))
            mark = ((base * 1_000_003 + begun.epoch) * 1_000_003 + begun.generation) % (1 << 62)
            self._of_worker(worker.id)[3] = mark
            marks = self._cells[self._HEAD :].view(-1, 4)[:busy, 3]
            if not bool((marks == mark).all()):
                return
            ended = [base, begun.epoch, begun.position, begun.generation, busy]
        if int(self._cells[self._GENERATION]) != begun.generation:
            return
        if worker is not None:
            self._cells[self._ENDED] = torch.tensor(ended)
        self.set(begun.epoch + 1, 0)

    def _of_worker(self, worker: int) -> torch.Tensor:
        cells: torch.Tensor = self._cells[self._HEAD :].view(-1, 4)[worker]
        return cells


def _base_seed(worker: WorkerInfo) -> int:
    """The seed that a loader draws for each iteration: the same in all its workers."""
    return worker.seed - worker.id
