"""The times t of a batch: how they are drawn, and how they are given.

::

    n = 8 rows of the global batch; one u in each of n strata of [0, 1)              (MDLM's code, ``antithetic_sampling``)

    index     0     1     2     3     4     5     6     7
    stratum   2     7     4     1     6     3     0     5        (a · index + turn) mod n, here a = 5 and turn = 2
    t      low + (high − low) · (stratum + u) / n

The mean of the n times has a standard deviation of n^{−3/2} / √12 instead of n^{−1/2} / √12: 0.0016 instead of 0.051 for 32 rows,
and so much less of the spread of the loss comes from t.

MDLM's code has a = 1 and turn = 0: it leaves it to the shuffled order that t of a row is uniform, and the first micro-batch of a batch that is split
has all the small t. Here ``turn`` is drawn for each global batch, so that t of a row is uniform in any order, and a is the number coprime to n that is next to
n/φ, so that neighbouring rows, the rows of each rank, and the blocks of a row are spread over the interval as well.
"""

from __future__ import annotations

import math
from itertools import count as counting
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..batch import Array, Batch
from .example import Floats, Rows, to_numpy
from .keyed import GOLDEN, U64, ViewError, below, epoch_seed, integers, uniforms, unit

Sampling = Literal["antithetic", "sequence"]
"""How times are drawn.

``"antithetic"``, the default of every view that draws times, as in the code of MDLM, BD3-LM, Prime (text) and PGM: over the global batch, one in each of its n
strata. t of a row depends on (seed, epoch, purpose, first position and size of the global batch, index of the row in it): it is the same for any number of ranks, and
another where the batch is another. Parts of a batch of a loader (``batch[2:5]``) have the times of the whole. Without ``batch.global_batch`` (``ds[:32]``) the batch is
its own global batch, keyed by its sequence ids: of it make the example of the whole and split that, as its parts have other times.

``"sequence"``: for each sequence on its own, keyed by (seed, purpose, sequence) and turned by the golden ratio in every epoch, whatever the batch.
"""

LAST_TIME = np.nextafter(np.float32(1), np.float32(0))
"""The largest t that is drawn: α(1) = 0 would make some weights infinite."""


def row_times(
    batch: Batch, rows: Rows, sampling: Sampling, *, seed: int, epoch: int, purpose: str, low: float, high: float
) -> Floats:
    """One time for every row, uniform in [low, high): [B] float32. See :data:`Sampling`."""
    return batch_times(batch, rows, sampling, 1, seed=seed, epoch=epoch, purpose=purpose, low=low, high=high)[:, 0]


def batch_times(
    batch: Batch,
    rows: Rows,
    sampling: Sampling,
    count: int,
    *,
    seed: int,
    epoch: int,
    purpose: str,
    low: float,
    high: float,
) -> Floats:
    """``count`` times for every row, each uniform in [low, high): [B, count] float32. See :data:`Sampling`."""
    if sampling == "sequence":
        return times(rows.sequence_ids, count, seed=seed, epoch=epoch, purpose=purpose, low=low, high=high)
    if sampling != "antithetic":
        raise ViewError(f"sampling: got {sampling!r}, valid: 'antithetic', 'sequence'")
    return antithetic_times(batch, rows, count, seed=seed, epoch=epoch, purpose=purpose, low=low, high=high)


def antithetic_times(
    batch: Batch, rows: Rows, count: int, *, seed: int, epoch: int, purpose: str, low: float, high: float
) -> Floats:
    """One t in each of the n · ``count`` strata of the global batch's n rows: [B, count] float32.

    Purposes: ``<purpose>_turn``, of the first row, and ``<purpose>_row``, ``count`` uniforms of each. Rows are told apart by their positions in the order of the
    epoch (stream 1), without a global batch by their sequence ids (stream 0).
    """
    _check(low, high)
    key = epoch_seed(seed, epoch)
    place = batch.global_batch
    first, stream = first_of(batch, rows)
    if place is None:
        total, index, ids = len(rows.ids), np.arange(len(rows.ids), dtype=np.uint64), rows.sequence_ids
    elif len(rows.ids) != place.held_rows:
        raise ViewError(
            f"batch: got {len(rows.ids)} rows, but its global batch of {place.rows} rows has "
            f"{place.held_rows} for rank {place.rank} of {place.world_size}; t is drawn over all of them. Valid: the whole batch (split its example afterwards); or "
            "`batch.global_batch = None`, which draws over these rows alone; or sampling='sequence'"
        )
    else:
        total, index = place.rows, place.indices()
        ids = np.uint64(place.begin) + index
    cells = total * count
    if cells == 0:
        return np.zeros((0, count), np.float32)
    if cells >= 1 << 32:
        raise ViewError(
            f"batch: got {total} rows with {count} times each, valid: less than 2^32 times in a global batch"
        )
    turn = below(key, f"{purpose}_turn", first, cells, stream).astype(np.uint64)
    cell = index[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
    stratum = (cell * np.uint64(stride(cells)) + turn) % np.uint64(cells)
    part = (stratum + uniforms(key, f"{purpose}_row", ids, count, stream)) / cells
    return stored_time(low + (high - low) * part, low, high)


def first_of(batch: Batch, rows: Rows) -> tuple[U64, int]:
    """What a choice for the whole global batch is keyed by: an id, uint64 [1] ([0] of no rows), and a stream.

    The position of its first row in the order of the epoch, stream 1; without a global batch the first sequence id, stream 0.
    """
    if batch.global_batch is None:
        return rows.sequence_ids[:1], 0
    return np.asarray([batch.global_batch.begin], np.uint64), 1


def stride(cells: int) -> int:
    """The number coprime to ``cells`` that is next to cells/φ; of two that are equally near, the smaller."""
    ideal = round(cells * (math.sqrt(5.0) - 1.0) / 2.0)
    near = (a for step in counting() for a in (ideal - step, ideal + step))
    return next(a for a in near if a >= 1 and math.gcd(a, cells) == 1)


def times(
    sequence_ids: U64, count: int, *, seed: int, epoch: int, purpose: str, low: float, high: float, stream: int = 0
) -> Floats:
    """t of every row on its own, uniform in [low, high): [B, count] float32.

    t = low + (high − low) · ((u + epoch/φ) mod 1), u keyed by (seed, purpose, sequence, stream): uniform in every epoch
    and independent between sequences, while the epochs of one sequence spread over the interval instead of falling at
    random (the additive recurrence of the golden ratio, discrepancy O(log n / n)).
    """
    epoch_seed(seed, epoch)  # for its checks
    _check(low, high)
    turn = np.uint64(epoch * GOLDEN & (1 << 64) - 1)
    part = unit(integers(seed, purpose, sequence_ids, count, stream) + turn)
    return stored_time(low + (high - low) * part, low, high)


def _check(low: float, high: float) -> None:
    if not 0 <= low < high <= 1:
        raise ViewError(f"t: got the interval {low} to {high}, valid: 0 <= low < high <= 1")


def stored_time(t: npt.NDArray[np.float64], low: float, high: float) -> Floats:
    """t as float32, not rounded out of its bounds."""
    stored = t.astype(np.float32)
    wide = stored.astype(np.float64)
    up, down = np.nextafter(stored, np.float32(2)), np.nextafter(stored, np.float32(-1))
    stored = np.where(wide < low, up, np.where(wide > high, down, stored))
    return np.minimum(stored, LAST_TIME).astype(np.float32)


def given_times(t: float | Array, rows: int) -> Floats:
    """t that the caller gives, one for all rows or one each: [B] float32."""
    given = to_numpy(t).astype(np.float32)
    if given.shape not in ((), (rows,)):
        raise ViewError(f"t: got shape {list(given.shape)}, valid: a number or [{rows}], one for each row")
    if given.size and not ((given > 0) & (given <= 1)).all():
        raise ViewError(f"t: got {given.min()} to {given.max()}, valid: more than 0, at most 1")
    return np.broadcast_to(given, (rows,)).copy()
