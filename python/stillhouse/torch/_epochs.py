"""Epochs: their order, who takes what of them, and the place where the next one begins."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed

from .. import _core
from .._order import GIVEN, VERSION, Order, State
from ..batch import Batch
from ..dataset import Dataset, opened
from ..place import GlobalBatch
from ._callers import refuse_accelerate, refuse_counting_anew
from ._mixture import MixedSteps, Mixture
from ._place import Place


class Epochs:
    """What :class:`ShardDataset` and :class:`StreamingShardDataset` have in common."""

    def __init__(
        self,
        dataset: Dataset | Mixture | str | os.PathLike[str],
        *,
        batch_size: int,
        split: str = "train",
        columns: Sequence[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        shuffle_blocks: int = 128,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool | None = None,
        transform: Callable[[Batch], Any] | None = None,
        storage: Mapping[str, Any] | None = None,
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_gigabytes: float | None = None,
        cache_megabytes: int = 512,
        evaluation: bool = False,
    ) -> None:
        self.dataset: Dataset | Mixture
        if isinstance(dataset, Mixture):
            self.dataset = dataset
        else:
            self.dataset = opened(
                dataset,
                split=split,
                columns=columns,
                storage=storage,
                cache_megabytes=cache_megabytes,
                disk_cache=disk_cache,
                disk_cache_gigabytes=disk_cache_gigabytes,
            )
        if not 1 <= batch_size < 1 << 32:
            raise ValueError(f"batch_size: got {batch_size}, valid: 1 to 2^32 - 1")
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank and world_size: got {rank} and {world_size}, valid: both or none")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank: got {rank}, valid: 0 to {world_size - 1} (world_size {world_size})")
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.transform = transform
        self.evaluation = evaluation
        self._given_ranks = None if rank is None or world_size is None else (rank, world_size)
        self._place = Place(Order(shuffle, seed, shuffle_blocks))
        self._now: State | None = None

    @property
    def rank(self) -> int:
        """This trainer's number, explicit or of ``torch.distributed``; 0 where neither is there."""
        return self._ranks()[0]

    @property
    def world_size(self) -> int:
        """How many trainers there are."""
        return self._ranks()[1]

    def _ranks(self) -> tuple[int, int]:
        if self._given_ranks is not None:
            return self._given_ranks
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    @property
    def epoch(self) -> int:
        """The epoch of the next batch: once the last one of an epoch is given out, the next epoch. (``batch.state`` has that of a batch.)"""
        return self._begin()[0]

    @property
    def remaining(self) -> int:
        """Batches of this rank from here to the end of the epoch that is under way; of a whole epoch where none is."""
        here = (int(self._now["epoch"]), int(self._now["position"])) if self._now is not None else self._place.get()
        return self.steps(*self._normal(*here)).own_batches

    def batches_per_epoch(self) -> int:
        """Batches of this rank in a whole epoch: what ``len`` says, the same in mid-epoch."""
        return self.steps(0, 0).own_batches

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its beginning; or from the loaded place, where that is in this epoch.

        Not needed where epochs are iterated to their last batch: the next one follows by itself. An epoch that was left before begins
        anew at the next iteration. (Under torch's own DataLoader with workers, or with a sampler, an epoch counts as ended when its last batch was
        asked for, a few batches before it is given out: there call this before an iteration if you leave epochs early.)

        Warns where a loaded place is given up by it: the rest of that epoch is then left out.
        """
        if not 0 <= epoch < 1 << 32:
            raise ValueError(f"epoch: got {epoch}, valid: 0 to 2^32 - 1")
        refuse_accelerate()
        here, position = self._begin()
        if epoch == here:
            return
        refuse_counting_anew(epoch, here)
        if position > 0:
            warnings.warn(
                f"set_epoch({epoch}): the loaded state is row {position:,} of {len(self.dataset):,} of epoch {here}, "
                "whose other rows are now left out; a trainer that resumes must go on counting its epochs from there",
                stacklevel=2,
            )
        self._place.set(epoch, 0)
        self._now = None

    def state_at(self, epoch: int, position: int) -> State:
        """The state in which the rows before this position of the epoch are given out."""
        return {
            "version": VERSION,
            **self._identity(),
            **asdict(self._place.order()),
            "epoch": epoch,
            "position": position,
        }

    def _identity(self) -> State:
        """What a state must agree with: the data, and how its rows are numbered."""
        if isinstance(self.dataset, Mixture):
            return self.dataset.identity()
        core = self.dataset._core
        return {
            "dataset": core.job_hash,
            "split": self.dataset.split,
            "rows": len(self.dataset),
            "block_rows": core.block_rows,
        }

    def state_dict(self) -> State:
        """Where the data set is: after the last batch given out, counted over all ranks. Plain numbers and strings.

        Without worker processes, and under :class:`stillhouse.torch.DataLoader`, that is exact. Under another loader with workers this process
        does not know what was given out: take ``batch.state`` of the last batch, or the loader's own state.
        """
        return dict(self._now) if self._now is not None else self.state_at(*self._place.get())

    def load_state_dict(self, state: State) -> None:
        """The next iteration goes on at this state: same order, next row. World size, batch size and workers may be others.

        A state of the end of an epoch goes on with the next epoch. Raises ``ValueError`` for the state of another data set or split.
        """
        self._check(state)
        self.adopt(state)
        self._place.set(int(state["epoch"]), int(state["position"]))
        self._now = None

    def adopt(self, state: State) -> None:
        """Takes over the order of a state."""
        self._place.set_order(Order(bool(state["shuffle"]), int(state["seed"]), int(state["shuffle_blocks"])))

    def _check(self, state: State) -> None:
        here = self.state_at(0, 0)
        missing = [key for key in here if key not in state]
        if missing:
            hint = ""
            if "_snapshot" in state or "_num_yielded" in state:
                hint = "; this is the state of a StatefulDataLoader: load it there, or load batch.state here"
            raise ValueError(f"state: has no {', '.join(missing)}{hint}")
        foreign = [key for key in state if key not in here and key != GIVEN]
        if foreign:
            raise ValueError(
                f"state: is of another kind of loader, which has {', '.join(foreign)}; valid: a state of {type(self).__name__}"
            )
        if state["version"] > VERSION:
            raise ValueError(
                f"state: got version {state['version']}, valid: up to {VERSION}; install a newer stillhouse"
            )
        for key in self._identity():
            if state[key] != here[key]:
                raise ValueError(
                    f"state: is of another data set: got {key} {state[key]!r}, {self.dataset.url} has {here[key]!r}"
                )
        if not 0 <= state["position"] <= here["rows"]:
            raise ValueError(f"state: got position {state['position']}, valid: 0 to {here['rows']}")

    def _leave_out(self, rows: int) -> bool:
        """Whether the last global batch is left out, of so many rows that are still to come."""
        rest = rows % (self.batch_size * self.world_size)
        return 0 < rest < self.world_size if self.drop_last is None else self.drop_last

    def _normal(self, epoch: int, position: int) -> tuple[int, int]:
        """The same place, but for the end of an epoch the beginning of the next one."""
        rows = len(self.dataset) - position
        left_out = rows % (self.batch_size * self.world_size) if self._leave_out(rows) else 0
        return (epoch, position) if position == 0 or rows > left_out else (epoch + 1, 0)

    def _begin(self) -> tuple[int, int]:
        """Where the next iteration begins."""
        return self._normal(*self._place.get())

    def refuse_empty(self) -> None:
        """An epoch without any batch would be training on nothing."""
        rows = len(self.dataset)
        if (rows and not self._leave_out(rows)) or rows >= self.batch_size * self.world_size:
            return
        raise ValueError(
            f"{self.dataset.url} ({self.dataset.split}): an epoch has no batch: {rows:,} rows for {self.world_size} ranks with "
            f"batch_size {self.batch_size} and drop_last={self.drop_last}; valid: fewer ranks, smaller batches, drop_last=False"
        )

    def steps(self, epoch: int, position: int, worker: int = 0, workers: int = 1) -> _core.Steps | MixedSteps:
        """The batches of one worker from a position of an epoch on."""
        rank, world_size = self._ranks()
        order = self._place.order()
        source = self.dataset if isinstance(self.dataset, Mixture) else self.dataset._core
        return source.steps(
            epoch=epoch,
            seed=order.seed if order.shuffle else None,
            window_blocks=order.shuffle_blocks,
            start=position,
            rank=rank,
            world=world_size,
            batch_rows=self.batch_size,
            drop_last=self._leave_out(len(self.dataset) - position),
            worker=worker,
            workers=workers,
        )

    def after(self, epoch: int, start: int, batches: int) -> State:
        """The state when this trainer has got so many batches of an iteration that began at ``start``."""
        given = batches * self.batch_size * self.world_size
        return self.state_at(epoch, min(start + given, len(self.dataset)))

    def global_batch(self, epoch: int, start: int, end: int) -> GlobalBatch | None:
        """The global batch that ends at a position, in an iteration that began at ``start``."""
        rank, world_size = self._ranks()
        size = self.batch_size * world_size
        begin = start + (end - start - 1) // size * size
        return GlobalBatch(0 if self.evaluation else epoch, begin, end - begin, rank, world_size)

    def finish(self, batch: Batch) -> Any:
        """Tensors, and the transform."""
        tensors = batch.torch()
        return tensors if self.transform is None else self.transform(tensors)

    def __getstate__(self) -> dict[str, Any]:
        # a spawned worker has no torch.distributed of its own; a spawned trainer may come to have one
        known = torch.distributed.is_available() and torch.distributed.is_initialized()
        return {**self.__dict__, "_given_ranks": self._ranks() if known else self._given_ranks}
