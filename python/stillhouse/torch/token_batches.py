"""Batches by tokens: as many rows as ``max_tokens`` allows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._epochs_base import State
from .._order import Order, Share, steps_of
from ..dataset import Dataset
from ._token_batches import TokenBatches, TokenSteps, batches_of_every_epoch, lengths_of
from .streaming import StreamingShardDataset

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._epochs import EpochOptions


class TokenBatchDataset(StreamingShardDataset):
    """Batches of rows of different lengths, up to ``max_tokens`` tokens each, padding included (rows × the longest).

    ::

        ds = st.TokenBatchDataset("s3://shards/chat", max_tokens=16_384, seed=1)  # `pack.mode: pad`, a document per row
        for batch in st.DataLoader(ds):
            batch["input_ids"]  # [B, longest], B · longest <= 16,384

    Where rows are stored with padding (``pack.mode: pad``), every column with positions ends at the longest row of the
    batch. Where rows are stored in their own lengths (``pack.remainder: keep``), call ``batch.padded()``. Rows of one
    length L give batches of ``max_tokens // L`` rows.

    The order of the rows is that of :class:`StreamingShardDataset`. To pad little, each ``length_window`` rows of it
    are sorted by length and cut into batches, which then come in random order (keyed by seed, epoch and window). With
    ``length_window=1`` or ``shuffle=False`` the rows keep their order; where lengths vary much, batches are then padded
    to twice their tokens and more.

    Batches depend on the data set, ``max_tokens``, ``length_window``, the seed and the epoch, not on ranks and workers:
    rank r of W takes every W-th. ``drop_last`` decides what happens where fewer than W batches are left at the end:

    - None, the default: those with most rows are divided among the ranks. Fewer rows than ranks are left out.
    - True: they are left out.
    - False: the first ranks have one batch more.

    A state is a position counted over all ranks. It loads at any world size and number of workers, with the same
    ``max_tokens`` and ``length_window``.

    ``len`` is the same in every epoch. Epochs would differ by a few batches, because rows meet in other batches. So
    every epoch has the number of the first plus its square root: the batches with most rows are halved.

    ``lengths`` (int [rows], the tokens of each row) saves reading them; pass ``ds.lengths`` of an earlier run. Without
    it, the constructor reads one column of all rows: ``attention_mask`` where there is padding, ``input_ids`` where
    rows differ in length, none where all rows have one length.

    Memory beyond that of :class:`StreamingShardDataset`: 4 bytes a row for the lengths, and 8 for the order of each of
    up to two epochs. Each rank reads the blocks of its own batches, which are nearly all blocks.

    Raises ``ValueError`` for a row that is longer than ``max_tokens``.
    """

    _batch_option = "max_tokens"

    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        *,
        max_tokens: int,
        length_window: int = 4096,
        lengths: npt.ArrayLike | None = None,
        **options: Unpack[EpochOptions],
    ) -> None:
        if "evaluation" in options:
            raise TypeError("evaluation: batches by tokens have no global batch; valid: StreamingShardDataset")
        super().__init__(dataset, batch_size=1, **options)
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
                f"max_tokens: got {max_tokens}, but row {row} of {self.dataset.url} ({self.dataset.split}) has "
                f"{self.lengths[row]} tokens; valid: {self.lengths[row]} or more"
            )
        self._cut: dict[tuple[int, Order], TokenBatches] = {}
        self._count: tuple[Order, int] | None = None

    def batches(self, epoch: int) -> TokenBatches:
        """The batches of an epoch. The last two epochs are kept."""
        order = self._order
        if (epoch, order) not in self._cut:
            count = self._batches_of_every_epoch()
            window = self.length_window
            made = self._greedy(epoch, window)
            while len(made.bounds) - 1 > count:  # rarely: rows sorted in larger windows take fewer batches
                window *= 2
                made = self._greedy(epoch, window)
            self._cut = {**dict(list(self._cut.items())[-1:]), (epoch, order): made.filled(count)}
        return self._cut[epoch, order]

    def _batches_of_every_epoch(self) -> int:
        order = self._order
        if self._count is None or self._count[0] != order:
            first = self._greedy(0, self.length_window)
            self._count = (order, batches_of_every_epoch(first, self.lengths, order.shuffle))
        return self._count[1]

    def _greedy(self, epoch: int, window: int) -> TokenBatches:
        order = self._order
        steps = steps_of(self.dataset, order, Share(1 << 16), epoch)
        rows = np.concatenate([np.zeros(0, np.int64), *(rows.astype(np.int64) for rows, _ in steps)])
        return TokenBatches.cut(
            rows, self.lengths, self.max_tokens, window if order.shuffle else 1, order.shuffle_seed, epoch
        )

    def steps(self, epoch: int, position: int, worker: int = 0, workers: int = 1) -> TokenSteps:
        """The batches of one worker from a position of an epoch on."""
        cut = self.batches(epoch)
        return TokenSteps(self.dataset, cut, self.lengths, self._order, self._share, position, worker, workers)

    def batches_per_epoch(self) -> int:
        """Batches of this rank in a whole epoch, the same in every epoch.

        With ``drop_last=None``, an epoch has one less where its last batches have fewer rows than there are ranks.
        """
        full, rest = divmod(self._batches_of_every_epoch(), self.world_size)
        last = rest > self.rank if self.drop_last is False else rest > 0 and not self.drop_last
        return full + last

    def after(self, epoch: int, start: int, batches: int) -> State:
        """The state after this many batches of an iteration that began at ``start``."""
        cut = self.batches(epoch)
        reached = min(cut.batch_at(start) + batches * self.world_size, len(cut.bounds) - 1)
        return self.state_at(epoch, int(cut.bounds[reached]))

    def global_batch(self, epoch: int, start: int, end: int) -> None:
        """None: each rank has batches of its own, whatever the number of ranks."""

    def _ended(self, epoch: int, position: int) -> bool:
        return position == len(self.dataset) or not self.steps(epoch, position).given_out

    def _identity(self) -> State:
        return {**super()._identity(), "max_tokens": self.max_tokens, "length_window": self.length_window}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cut": {}}
