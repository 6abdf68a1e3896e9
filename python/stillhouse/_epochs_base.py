"""What the iterators of numpy, JAX and torch have in common: options, batches and states of an epoch; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ._order import Order, Share, Steps, steps_of
from .dataset import Dataset, OpenOptions
from .info import Info
from .place import GlobalBatch

State = dict[str, Any]

VERSION = 1

GIVEN = "given"
"""Key in a DataLoader's state: the batches of the epoch that each rank received, over all runs. Data sets ignore it."""


class OrderOptions(OpenOptions, total=False):
    """Optional arguments of every iterator."""

    shuffle: bool
    seed: int
    shuffle_blocks: int
    drop_last: bool | None


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


class EpochsBase:
    """The epochs of one data set for one rank: their batches, and the states between these.

    Subclasses iterate, and keep the place where the next iteration begins.
    """

    dataset: Dataset
    _order: Order
    _share: Share
    _last_state: State | None
    """The state after the last batch given out; None if there was none since the place was set."""
    _batch_option = "batch_size"
    """Name of the attribute that limits a batch, for messages."""

    @property
    def info(self) -> Info:
        """The facts of the data set: vocabulary, length, noise, sub-tokens, special tokens."""
        return self.dataset.info

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
                hint = "; this is the state of a StatefulDataLoader: load it into that loader, or load batch.state here"
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
