"""Batches by tokens: as many rows as fit a number of tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._order import Order, State
from ..batch import Batch
from ..dataset import Dataset
from ._token_batches import TokenBatches, TokenSteps, batches_of_every_epoch, lengths_of
from .streaming import StreamingShardDataset


class TokenBatchDataset(StreamingShardDataset):
    """Batches of up to ``max_tokens`` tokens, padding counted: rows × the longest of them. For rows of different lengths.

    ::

        ds = st.TokenBatchDataset("s3://shards/chat", max_tokens=16_384, seed=1)  # packed with `mode: pad`, a document per row
        for batch in st.DataLoader(ds):
            batch["input_ids"]  # [B, longest], B · longest <= 16,384

    Where rows are stored with padding (``pack.mode: pad``), every column with positions ends where the longest row of the batch does. Where they are stored
    in their lengths (``pack.remainder: keep``), take ``batch.padded()``. Rows of one length give batches of ``max_tokens // L`` rows.

    What is cut into batches is the order of :class:`StreamingShardDataset`. To pad little, each ``length_window`` rows of it are sorted by length,
    cut, and their batches put into a random order (keyed by seed, epoch and window). 1, or ``shuffle=False``, leaves the rows in order; batches are then
    padded to twice their tokens and more where lengths vary much.

    Batches depend on the data set, ``max_tokens``, ``length_window``, the seed and the epoch, not on ranks and workers: rank r of W takes every W-th. All ranks
    take equally many: where fewer than W batches are left at the end, those with most rows are divided among the ranks (``drop_last=None``; less than
    one row for each rank is left out), or they are left out (True), or the first ranks have one more (False). A state is a position
    again, counted over all ranks, and goes on at any world size and number of workers, with the same ``max_tokens`` and ``length_window``.

    ``len`` is the same in every epoch: epochs would differ by a few batches, as rows meet in others, so all are brought to the number of the
    first and its square root more, by halving the batches with most rows.

    ``lengths`` (int [rows], tokens of each row: ``ds.lengths`` of another time) spares reading them. Else one column of all rows is read when the
    data set is made: ``attention_mask`` where there is padding, ``input_ids`` where rows differ in length, none where all have L.
    Memory beside that of :class:`StreamingShardDataset`: 4 bytes a row for lengths, 8 for the order of each of up to two epochs. Each rank reads the blocks that its batches are in, which is nearly all of them.

    Raises ``ValueError`` for a row that is longer than ``max_tokens``.
    """

    dataset: Dataset

    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        *,
        max_tokens: int,
        length_window: int = 4096,
        lengths: npt.ArrayLike | None = None,
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
    ) -> None:
        super().__init__(
            dataset,
            batch_size=1,
            split=split,
            columns=columns,
            shuffle=shuffle,
            seed=seed,
            shuffle_blocks=shuffle_blocks,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            transform=transform,
            storage=storage,
            disk_cache=disk_cache,
            disk_cache_gigabytes=disk_cache_gigabytes,
            cache_megabytes=cache_megabytes,
        )
        for name, value in (("max_tokens", max_tokens), ("length_window", length_window)):
            if not 1 <= value < 1 << 32:
                raise ValueError(f"{name}: got {value}, valid: 1 to 2^32 - 1")
        self.max_tokens, self.length_window = max_tokens, length_window
        self.lengths = lengths_of(self.dataset) if lengths is None else np.asarray(lengths).astype(np.int32)
        """Tokens of each row, int32 [rows]."""
        if self.lengths.shape != (len(self.dataset),):
            raise ValueError(
                f"lengths: got shape {list(self.lengths.shape)}, valid: [{len(self.dataset)}], one for each row"
            )
        if len(self.lengths) and self.lengths.max() > max_tokens:
            row = int(self.lengths.argmax())
            raise ValueError(
                f"max_tokens: got {max_tokens}, but row {row} of {self.dataset.url} ({self.dataset.split}) has {self.lengths[row]} tokens; "
                f"valid: {self.lengths[row]} or more"
            )
        self._cut: dict[tuple[int, Order], TokenBatches] = {}
        self._count: tuple[Order, int] | None = None

    def batches(self, epoch: int) -> TokenBatches:
        """How an epoch is cut. The last two that were asked for are kept."""
        order = self._place.order()
        if (epoch, order) not in self._cut:
            count = self._batches_of_every_epoch()
            window = self.length_window
            made = self._greedy(epoch, window)
            while len(made.bounds) - 1 > count:  # hardly ever: sorted in larger windows, rows take fewer batches
                window *= 2
                made = self._greedy(epoch, window)
            self._cut = {**dict(list(self._cut.items())[-1:]), (epoch, order): made.filled(count)}
        return self._cut[epoch, order]

    def _batches_of_every_epoch(self) -> int:
        order = self._place.order()
        if self._count is None or self._count[0] != order:
            self._count = (
                order,
                batches_of_every_epoch(self._greedy(0, self.length_window), self.lengths, order.shuffle),
            )
        return self._count[1]

    def _greedy(self, epoch: int, window: int) -> TokenBatches:
        order = self._place.order()
        seed = order.seed if order.shuffle else None
        steps = self.dataset._core.steps(
            epoch=epoch, seed=seed, window_blocks=order.shuffle_blocks, start=0, rank=0, world=1,
            batch_rows=1 << 16, drop_last=False, worker=0, workers=1,
        )  # fmt: skip
        rows = np.concatenate([np.zeros(0, np.int64), *(rows.astype(np.int64) for rows, _ in steps)])
        return TokenBatches.cut(rows, self.lengths, self.max_tokens, window if order.shuffle else 1, seed, epoch)

    def steps(self, epoch: int, position: int, worker: int = 0, workers: int = 1) -> TokenSteps:  # type: ignore[override]  # of our own
        """The batches of one worker from a position of an epoch on."""
        rank, world = self._ranks()
        return TokenSteps(
            self.dataset, self.batches(epoch), self.lengths, start=position, rank=rank, world=world, drop_last=self.drop_last,
            worker=worker, workers=workers, window_blocks=self._place.order().shuffle_blocks,
        )  # fmt: skip

    def batches_per_epoch(self) -> int:
        """Batches of this rank in an epoch, the same in all of them (``drop_last=None``: one less where the last ones have too few rows for all ranks)."""
        full, rest = divmod(self._batches_of_every_epoch(), self.world_size)
        last = rest > self.rank if self.drop_last is False else rest > 0 and not self.drop_last
        return full + last

    def after(self, epoch: int, start: int, batches: int) -> State:
        """The state when this trainer has got so many batches of an iteration that began at ``start``."""
        cut = self.batches(epoch)
        reached = min(cut.batch_at(start) + batches * self.world_size, len(cut.bounds) - 1)
        return self.state_at(epoch, int(cut.bounds[reached]))

    def global_batch(self, epoch: int, start: int, end: int) -> None:
        """None: ranks have batches of their own here, which are the same for any number of them."""

    def refuse_empty(self) -> None:
        """An epoch without any batch would be training on nothing."""
        if self.steps(0, 0).given_out == 0:
            raise ValueError(
                f"{self.dataset.url} ({self.dataset.split}): an epoch has no batch: {len(self.dataset):,} rows for {self.world_size} ranks with "
                f"max_tokens {self.max_tokens} and drop_last={self.drop_last}; valid: fewer ranks, smaller batches, drop_last=False"
            )

    def _normal(self, epoch: int, position: int) -> tuple[int, int]:
        if position == 0:
            return epoch, 0
        over = position == len(self.dataset) or not self.steps(epoch, position).given_out
        return (epoch + 1, 0) if over else (epoch, position)

    def _identity(self) -> State:
        return {**super()._identity(), "max_tokens": self.max_tokens, "length_window": self.length_window}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cut": {}}
