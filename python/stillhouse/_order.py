"""The order of an epoch and the states in it, without torch: what every iterator of this package goes by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import _core
    from .dataset import Dataset

State = dict[str, Any]

VERSION = 1

GIVEN = "given"
"""Key of a loader's state: the batches of the epoch that each rank had got, over all the runs of it. Data sets do without."""


@dataclass(frozen=True)
class Order:
    """What decides the order of an epoch, besides the data set and the epoch's number."""

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
        """The order that a state is a place in."""
        return cls(bool(state["shuffle"]), int(state["seed"]), int(state["shuffle_blocks"]))


@dataclass(frozen=True)
class Share:
    """Which rows of an epoch a trainer takes: every ``world_size``-th from ``rank`` on, ``batch_size`` at a time.

    ``drop_last`` leaves the last global batch out where it is not full; None: where it has fewer rows than there are trainers, some of which
    would have to do without a batch.
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

    def ended(self, position: int, rows: int) -> bool:
        """Whether no rank has a batch after this position. (Equal on all ranks, so that all begin the same epoch.)"""
        left = rows - position
        return left <= 0 or (left < self.batch_size * self.world_size and self.leaves_out(left))

    def leaves_out(self, left: int) -> bool:
        """Whether the last global batch of so many rows that are left is left out."""
        rest = left % (self.batch_size * self.world_size)
        return 0 < rest < self.world_size if self.drop_last is None else self.drop_last


def check_epoch(epoch: int) -> None:
    """Raises ``ValueError`` for a number that no epoch has."""
    if not 0 <= epoch < 1 << 32:
        raise ValueError(f"epoch: got {epoch}, valid: 0 to 2^32 - 1")


def state_at(dataset: Dataset, order: Order, epoch: int, position: int) -> State:
    """The state in which the rows before this position of the epoch are given out. Plain numbers and strings."""
    return {
        "version": VERSION,
        "dataset": dataset._core.job_hash,
        "split": dataset.split,
        "rows": len(dataset),
        "block_rows": dataset._core.block_rows,
        **asdict(order),
        "epoch": epoch,
        "position": position,
    }


def check_state(dataset: Dataset, state: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for what is no state, or that of another data set or split."""
    here = state_at(dataset, Order(False, 0, 1), 0, 0)
    missing = [key for key in here if key not in state]
    if missing:
        hint = ""
        if "_snapshot" in state or "_num_yielded" in state:
            hint = "; this is the state of a StatefulDataLoader: load it there, or load batch.state here"
        raise ValueError(f"state: has no {', '.join(missing)}{hint}")
    foreign = [key for key in state if key not in here and key != GIVEN]
    if foreign:
        raise ValueError(
            f"state: is of another kind of loader, which has {', '.join(foreign)}; valid: a state of batches of equally many rows"
        )
    if state["version"] > VERSION:
        raise ValueError(f"state: got version {state['version']}, valid: up to {VERSION}; install a newer stillhouse")
    for key in ("dataset", "split", "rows", "block_rows"):
        if state[key] != here[key]:
            raise ValueError(
                f"state: is of another data set: got {key} {state[key]!r}, {dataset.url} has {here[key]!r}"
            )
    if not 0 <= state["position"] <= here["rows"]:
        raise ValueError(f"state: got position {state['position']}, valid: 0 to {here['rows']}")
    check_epoch(state["epoch"])


def steps_of(
    dataset: Dataset, order: Order, share: Share, epoch: int, position: int, worker: int = 0, workers: int = 1
) -> _core.Steps:
    """The batches of a trainer, or of one of its workers, from a position of an epoch on."""
    return dataset._core.steps(
        epoch=epoch,
        seed=order.seed if order.shuffle else None,
        window_blocks=order.shuffle_blocks,
        start=position,
        rank=share.rank,
        world=share.world_size,
        batch_rows=share.batch_size,
        drop_last=share.leaves_out(len(dataset) - position),
        worker=worker,
        workers=workers,
    )
