"""The order of an epoch, each rank's share of it, and the states in it; without torch.

:class:`EpochsBase` puts them together. The iterators of numpy, JAX and torch inherit from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .dataset import OpenOptions
from .place import GlobalBatch

if TYPE_CHECKING:
    from . import _core
    from .dataset import Dataset

State = dict[str, Any]

VERSION = 1

GIVEN = "given"
"""Key in a DataLoader's state: the batches of the epoch that each rank has received, over all runs. Data sets ignore it."""


class OrderOptions(OpenOptions, total=False):
    """Optional arguments of every iterator."""

    shuffle: bool
    seed: int
    shuffle_blocks: int
    drop_last: bool | None


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


def explicit_ranks(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Rank and world size as the caller gave them; None where the caller gave neither."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size: got {rank} and {world_size}, valid: both or none")
    return None if rank is None or world_size is None else (rank, world_size)


def check_epoch(epoch: int) -> None:
    """Raises ``ValueError`` for a number that no epoch has."""
    if not 0 <= epoch < 1 << 32:
        raise ValueError(f"epoch: got {epoch}, valid: 0 to 2^32 - 1")


def identity_of(dataset: Dataset) -> State:
    """The facts of a data set that a state must match."""
    return {
        "dataset": dataset._core.job_hash,
        "split": dataset.split,
        "rows": len(dataset),
        "block_rows": dataset._core.block_rows,
    }


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


class EpochsBase:
    """The epochs of one data set as one rank sees them: which batches there are, and the states between them.

    Subclasses iterate, and keep the place where the next iteration begins.
    """

    dataset: Dataset
    _order: Order
    _share: Share
    _batch_option = "batch_size"
    """Name of the attribute that limits a batch, for messages."""

    def state_at(self, epoch: int, position: int) -> State:
        """The state after the rows before this position of the epoch. Plain numbers and strings."""
        return {
            "version": VERSION,
            **self._identity(),
            **asdict(self._order),
            "epoch": epoch,
            "position": position,
        }

    def _identity(self) -> State:
        return identity_of(self.dataset)

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for a dictionary that is not a state of this data set."""
        expected = self.state_at(0, 0)
        missing = [key for key in expected if key not in state]
        if missing:
            hint = ""
            if "_snapshot" in state or "_num_yielded" in state:
                hint = "; this is the state of a StatefulDataLoader: load it there, or load batch.state here"
            raise ValueError(f"state: has no {', '.join(missing)}{hint}")
        foreign = [key for key in state if key not in expected and key != GIVEN]
        if foreign:
            raise ValueError(
                f"state: is of another kind of loader, which has {', '.join(foreign)}; "
                f"valid: a state of {type(self).__name__}"
            )
        if state["version"] > VERSION:
            raise ValueError(
                f"state: got version {state['version']}, valid: up to {VERSION}; install a newer stillhouse"
            )
        for key in self._identity():
            if state[key] != expected[key]:
                raise ValueError(
                    f"state: is of another data set: got {key} {state[key]!r}, {self.dataset.url} has {expected[key]!r}"
                )
        if not 0 <= state["position"] <= len(self.dataset):
            raise ValueError(f"state: got position {state['position']}, valid: 0 to {len(self.dataset)}")
        check_epoch(state["epoch"])

    def steps(self, epoch: int, position: int, worker: int = 0, workers: int = 1) -> Steps:
        """The batches of one worker from a position of an epoch on."""
        return steps_of(self.dataset, self._order, self._share, epoch, position, worker, workers)

    def batches_per_epoch(self) -> int:
        """Batches of this rank in a whole epoch: the value of ``len``, the same in mid-epoch."""
        return self.steps(0, 0).own_batches

    def after(self, epoch: int, start: int, batches: int) -> State:
        """The state after this many batches of an iteration that began at ``start``."""
        return self.state_at(epoch, min(start + batches * self._share.global_rows, len(self.dataset)))

    def global_batch(self, epoch: int, start: int, end: int) -> GlobalBatch | None:
        """The global batch that ends at a position, in an iteration that began at ``start``."""
        share = self._share
        begin = start + (end - start - 1) // share.global_rows * share.global_rows
        return GlobalBatch(epoch, begin, end - begin, share.rank, share.world_size)

    def _ended(self, epoch: int, position: int) -> bool:
        """Whether no rank has a batch after this position."""
        return self._share.ended(len(self.dataset) - position)

    def _normal(self, epoch: int, position: int) -> tuple[int, int]:
        """The same epoch and position; the beginning of the next epoch where this one has ended."""
        return (epoch + 1, 0) if position and self._ended(epoch, position) else (epoch, position)

    def refuse_empty(self) -> None:
        """Raises ``ValueError`` where an epoch has no batch: a loop over epochs would train on nothing."""
        if self._ended(0, 0):
            share, option = self._share, self._batch_option
            raise ValueError(
                f"{option}: got {getattr(self, option)} with world_size {share.world_size} and drop_last "
                f"{share.drop_last}: an epoch has no batch; {self.dataset.url} ({self.dataset.split}) has "
                f"{len(self.dataset):,} rows; valid: fewer ranks, smaller batches, drop_last=False"
            )
