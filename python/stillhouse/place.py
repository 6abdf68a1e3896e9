"""Where a batch stands in its epoch: the global batch that it is a part of, and which of its rows it holds."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class GlobalBatch:
    """The rows that all ranks get in one step, and the rank that got these::

        order of the epoch   … │ begin, begin + 1, …                    begin + rows − 1 │ …
        row of it, index       │ 0      1      2      3      4      5      …    rows − 1 │
        rank, world_size = 3   │ 0      1      2      0      1      2      …             │

    ``begin`` is the position of its first row in the order of ``epoch``, counted over all ranks; ``rows`` are the rows of all
    ranks together. Row r of rank k is row k + r · ``world_size`` of the global batch. What is drawn from (seed, ``epoch``, ``begin``,
    index, ``rows``) is therefore the same however many ranks share the rows: 1 × 32, 2 × 16 or 4 × 8.

    Raises ``ValueError`` for what no loader can give.
    """

    epoch: int
    begin: int
    rows: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name, least in (("epoch", 0), ("begin", 0), ("rows", 1), ("world_size", 1), ("rank", 0)):
            value = operator.index(getattr(self, name))
            object.__setattr__(self, name, value)  # a plain int, whatever integer it was: it is pickled and compared
            if value < least:
                raise ValueError(f"{name}: got {value}, valid: {least} or more")
        if self.rank >= self.world_size:
            raise ValueError(f"rank: got {self.rank}, valid: 0 to {self.world_size - 1}")

    @property
    def local_rows(self) -> int:
        """Rows of this rank; 0 where the last global batch of an epoch has fewer rows than there are ranks before this one."""
        return max(0, -(-(self.rows - self.rank) // self.world_size))

    def indices(self, count: int | None = None) -> npt.NDArray[np.uint64]:
        """The index in the global batch of each of the first ``count`` rows of this rank, by default of all: uint64 [count]."""
        count = self.local_rows if count is None else count
        if not 0 <= count <= self.local_rows:
            raise ValueError(f"count: got {count}, valid: 0 to {self.local_rows}, the rows of rank {self.rank}")
        return np.uint64(self.rank) + np.uint64(self.world_size) * np.arange(count, dtype=np.uint64)
