"""The order of an epoch, each rank's share of it, and the core's batches for both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from . import _core
    from .dataset import Dataset


@dataclass(frozen=True)
class Order:
    """What determines the order of an epoch, besides the data set and the epoch's number."""

    shuffle: bool
    seed: int
    shuffle_blocks: int

    def __post_init__(self) -> None:
        if not 1 <= self.shuffle_blocks < 1 << 32:
            raise ValueError(f"shuffle_blocks: got {self.shuffle_blocks}, valid: 1 to 2^32 - 1")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed: got {self.seed}, valid: 0 to 2^64 - 1")

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Order:
        """The order in which a state is a position."""
        return cls(bool(state["shuffle"]), int(state["seed"]), int(state["shuffle_blocks"]))

    @property
    def shuffle_seed(self) -> int | None:
        """The seed; None where rows keep the order of the shards."""
        return self.seed if self.shuffle else None


@dataclass(frozen=True)
class Share:
    """The rows of an epoch that one rank takes: every ``world_size``-th from ``rank`` on, ``batch_size`` at a time.

    ``drop_last=True`` leaves out a last global batch that is not full, False never. None leaves it out where it has
    fewer rows than there are ranks, because some ranks would have no batch.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size < 1 << 32:
            raise ValueError(f"batch_size: got {self.batch_size}, valid: 1 to 2^32 - 1")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank: got {self.rank}, valid: 0 to {self.world_size - 1} (world_size {self.world_size})")

    @property
    def global_rows(self) -> int:
        """Rows of a full global batch."""
        return self.batch_size * self.world_size

    def leaves_out(self, left: int) -> bool:
        """Whether the last global batch is left out when ``left`` rows remain."""
        rest = left % self.global_rows
        return 0 < rest < self.world_size if self.drop_last is None else self.drop_last

    def ended(self, left: int) -> bool:
        """Whether no rank has a batch when ``left`` rows remain. All ranks agree, so they begin the same epoch."""
        return left <= 0 or (left < self.global_rows and self.leaves_out(left))


class Steps(Iterator[tuple[Any, int]], Protocol):
    """The batches of one worker of a rank: (row numbers, position after the batches of all ranks)."""

    own_batches: int
    """Batches of this rank until the end of the epoch, over all its workers."""

    def stream(self) -> Iterator[tuple[Any, int]]:
        """Starts to read them: (columns or batch, position after the batches of all ranks)."""
        ...


def steps_of(
    dataset: Dataset, order: Order, share: Share, epoch: int, position: int = 0, worker: int = 0, workers: int = 1
) -> _core.Steps:
    """The batches of one worker of a rank, from a position of an epoch on."""
    return dataset._core.steps(
        epoch=epoch,
        seed=order.shuffle_seed,
        window_blocks=order.shuffle_blocks,
        start=position,
        rank=share.rank,
        world=share.world_size,
        batch_rows=share.batch_size,
        drop_last=share.leaves_out(len(dataset) - position),
        worker=worker,
        workers=workers,
    )
