"""The place of a batch in its epoch: its global batch, and the rows that it holds of that."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class GlobalBatch:
    """The rows that all ranks get in one step, and the rank of this batch::

        order of the epoch   … │ begin, begin + 1, …                    begin + rows − 1 │ …
        row of it, index       │ 0      1      2      3      4      5      …    rows − 1 │
        rank, world_size = 3   │ 0      1      2      0      1      2      …             │

    - ``begin`` is the position of the first row in the order of ``epoch``, counted over all ranks.
    - ``rows`` counts the rows of all ranks. Row r of rank k is row k + r · ``world_size`` of the global batch.
    - ``part`` lists the rows of this rank that a part of the batch holds, in its order (``batch[2:5]``: 2, 3, 4). None
      means all of them.

    A random choice keyed by (seed, ``epoch``, ``begin``, index, ``rows``) is therefore the same for any number of
    ranks: 1 × 32, 2 × 16 or 4 × 8.

    Raises ``ValueError`` for values that no loader can give.
    """

    epoch: int
    begin: int
    rows: int
    rank: int = 0
    world_size: int = 1
    part: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, least in (("epoch", 0), ("begin", 0), ("rows", 1), ("world_size", 1), ("rank", 0)):
            value = operator.index(getattr(self, name))
            object.__setattr__(self, name, value)  # a plain int, because it is pickled and compared
            if value < least:
                raise ValueError(f"{name}: got {value}, valid: {least} or more")
        if self.rank >= self.world_size:
            raise ValueError(f"rank: got {self.rank}, valid: 0 to {self.world_size - 1}")
        for row in self.part or ():
            if not 0 <= row < self.local_rows:
                raise ValueError(
                    f"part: got row {row}, valid: 0 to {self.local_rows - 1}, the rows of rank {self.rank}"
                )

    @property
    def local_rows(self) -> int:
        """Rows of this rank; 0 where the last global batch has no more rows than there are ranks before this one."""
        return max(0, -(-(self.rows - self.rank) // self.world_size))

    @property
    def held_rows(self) -> int:
        """Rows of the batch: those of this rank, or of the part."""
        return self.local_rows if self.part is None else len(self.part)

    def indices(self, count: int | None = None) -> npt.NDArray[np.uint64]:
        """Indices in the global batch of the first ``count`` rows of the batch (default: all), uint64 [count]."""
        count = self.held_rows if count is None else count
        if not 0 <= count <= self.held_rows:
            raise ValueError(f"count: got {count}, valid: 0 to {self.held_rows}, the rows of rank {self.rank}")
        return np.uint64(self.rank) + np.uint64(self.world_size) * self._held()[:count].astype(np.uint64)

    def take(self, rows: slice | npt.NDArray[np.int64]) -> GlobalBatch:
        """The place of some of the batch's rows, by their numbers in it."""
        held = self._held()[rows]
        whole = np.array_equal(held, np.arange(self.local_rows))
        return replace(self, part=None if whole else tuple(held.tolist()))

    @staticmethod
    def joined(parts: Sequence[GlobalBatch | None]) -> GlobalBatch | None:
        """The place of several parts of one batch, joined; None if they belong to different batches."""
        first = parts[0]
        if first is None or any(part is None or replace(part, part=first.part) != first for part in parts):
            return None
        held = np.concatenate([part._held() for part in parts if part is not None])
        return replace(first, part=tuple(range(first.local_rows))).take(held)

    def _held(self) -> npt.NDArray[np.int64]:
        return np.arange(self.local_rows) if self.part is None else np.asarray(self.part, np.int64)
