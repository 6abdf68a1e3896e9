"""What all views share: the rows they read, the keys of their random choices, and the training example they give.

::

    batch ──► Rows (numpy: ids, valid, sequence ids) ──► masks, t, weights ──► Example, in the batch's kind and device

Every choice is a function of (seed, epoch, purpose, ``sequence_id``): a row becomes the same example in any batch,
worker or device. Masks are made on the CPU from [B, L] columns; noise where :mod:`stillhouse.noise` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..batch import Array, Batch, Ragged, is_torch
from ..errors import ColumnError
from ..mixed import keyed_ids
from .keyed import GOLDEN, U64, ViewError, epoch_seed, integers, unit

if TYPE_CHECKING:
    import torch

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

LAST_TIME = np.nextafter(np.float32(1), np.float32(0))
"""The largest t that is drawn: α(1) = 0 would make some weights infinite."""


@dataclass(frozen=True, eq=False)
class Example:
    """One batch of training examples: which positions are predicted, from what, and how much each counts.

    ========== ================= ===========================================================================
    input_ids  [B, L] integer    the context x^{−I}: the tokens, with ``mask_id`` at the targets
    targets    [B, L] bool       I, the positions to predict; never padding
    t          [B] float32       the time of each row, exactly the number that the masks were drawn with
    weights    [B, L] float32    weight of each token in the loss, w(t) in I and 0 outside
    valid      [B, L] bool       false on padding
    ========== ================= ===========================================================================

    The loss is Σ weights · (−log p(x^I | x^{−I}, ξ^I)). Arrays are of the batch's kind (numpy or torch) and device.
    Subclasses say where they differ.
    """

    batch: Batch
    input_ids: Any
    targets: Any
    t: Any
    weights: Any
    valid: Any

    def target_ids(self) -> Any:
        """x^I: the true tokens at the targets, row after row, [n]."""
        rows = rows_of(self.batch)
        return rows.give(rows.ids)[self.targets]

    def target_weights(self) -> Any:
        """The weights at the targets, row after row, [n] float32."""
        return self.weights[self.targets]

    def noise(self, **options: Any) -> Any:
        """ξ^I: the noise at the targets, row after row, [n, V]. Options are those of :func:`stillhouse.noise.replay`."""
        return replay(self.batch, self.targets, options)

    def triplet(self, **options: Any) -> tuple[Any, Any, Any]:
        """(x^{−I}, ξ^I, x^I), what a student of Gumbel distillation is trained on. Options are those of the noise."""
        return self.input_ids, self.noise(**options), self.target_ids()


def replay(batch: Batch, positions: Any, options: dict[str, Any]) -> Any:
    """Noise at positions; masks need no Rust core, so that it is imported only here."""
    from .. import noise

    return noise.replay(batch, positions=positions, **options)


@dataclass(frozen=True)
class Rows:
    """The columns every view reads, in numpy: ids [B, L], valid [B, L] bool, sequence ids [B] uint64."""

    ids: npt.NDArray[np.integer[Any]]
    valid: Bools
    sequence_ids: U64
    device: torch.device | None
    """Where results go; None: they stay numpy."""

    def give(self, array: npt.NDArray[Any]) -> Any:
        """An array as the batch holds its own: numpy, or torch on its device."""
        if self.device is None:
            return array
        import torch

        array = np.ascontiguousarray(array)
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)


def rows_of(batch: Batch) -> Rows:
    """Reads the columns."""
    column = batch["input_ids"]
    if isinstance(column, Ragged):
        raise ViewError("input_ids: rows differ in length (`pack.remainder: keep`); valid: batch.padded()")
    device = column.device if is_torch(column) else None
    ids = to_numpy(column)
    mask = batch.get("attention_mask")
    valid = np.ones(ids.shape, bool) if mask is None else to_numpy(mask).astype(bool)
    sequence_ids = to_numpy(batch["sequence_id"]).astype(np.int64, copy=False).view(np.uint64)
    return Rows(ids, valid, keyed_ids(batch, sequence_ids), device)


def to_numpy(value: Any) -> npt.NDArray[Any]:
    """An array on the CPU."""
    return np.asarray(value.detach().cpu().numpy() if is_torch(value) else value)


def stored_column(batch: Batch, column: str, section: str, instead: str) -> npt.NDArray[Any]:
    """A column that an optional section of the job file makes, in numpy."""
    if column not in batch:
        raise ColumnError(
            f"the batch has no column {column!r}; it has {', '.join(batch) or 'none'}. A job makes it with `{section}` "
            f"in its job file; {instead}"
        )
    return to_numpy(batch[column])


def mask_id_of(batch: Batch, mask_id: int | None) -> int:
    """The id that stands for a masked token."""
    if mask_id is not None:
        return mask_id
    if batch.info is not None and "mask" in batch.info.special_tokens:
        return batch.info.special_tokens["mask"]
    usual = f"vocab_size, {batch.info.vocab_size} here" if batch.info is not None else "the size of the vocabulary"
    raise ViewError(
        f"mask_id: the tokenizer of this data set has no mask token; give an id, commonly a new one ({usual})"
    )


def epoch_of(batch: Batch, epoch: int | None) -> int:
    """The epoch an argument gives, else that of the data set which made the batch, else 0."""
    return int((batch.state or {}).get("epoch", 0)) if epoch is None else epoch


def candidates(rows: Rows, never: Array | None) -> Bools:
    """Positions that may become targets, [B, L]: no padding, and none that ``never`` excludes."""
    if never is None:
        return rows.valid
    excluded = to_numpy(never).astype(bool)
    try:
        return np.asarray(rows.valid & ~np.broadcast_to(excluded, rows.valid.shape))
    except ValueError:
        raise ViewError(f"never: got shape {list(excluded.shape)}, valid: {list(rows.valid.shape)} or [L]") from None


def times(
    sequence_ids: U64, count: int, *, seed: int, epoch: int, purpose: str, low: float, high: float, stream: int = 0
) -> Floats:
    """t of every row, uniform in [low, high): [B, count] float32.

    t = low + (high − low) · ((u + epoch/φ) mod 1), u keyed by (seed, purpose, sequence, stream): uniform in every epoch
    and independent between sequences, while the epochs of one sequence spread over the interval instead of falling at
    random (the additive recurrence of the golden ratio, discrepancy O(log n / n)). MDLM's antithetic t, which spreads
    over the rows of a batch, would depend on the order of the rows.
    """
    epoch_seed(seed, epoch)  # for its checks
    if not 0 <= low < high <= 1:
        raise ViewError(f"t: got the interval {low} to {high}, valid: 0 <= low < high <= 1")
    turn = np.uint64(epoch * GOLDEN & (1 << 64) - 1)
    part = unit(integers(seed, purpose, sequence_ids, count, stream) + turn)
    return stored_time(low + (high - low) * part, low, high)


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
