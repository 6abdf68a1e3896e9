"""ARMD (Karami and Ghodsi 2026): tokens in an order of generation and in blocks, predicted from the blocks before.

::

    strided, N = 8, S = 2: streams 1 2 3 4 and 5 6 7 8, interleaved (positions from 0 in the arrays)
    order       0   4 | 1   5 | 2   6 | 3   7          π: the n-th token generated is x[order[n]]
    block       1   2 | 3   3 | 4   4 | 5   5          the heads one by one, then S tokens at a time

    strictly causal   n sees i where B(i) < B(n)  (Eq. 5)        causal   where B(i) ≤ B(n)  (Eq. 3)

The table of the paper's appendix A has the two masks swapped; the text is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..batch import Array, ArrayT, Batch
from .example import (
    Bools,
    Example,
    Rows,
    as_labels,
    epoch_of,
    refuse_loss_mask,
    replay,
    rows_of,
    stored_column,
    to_numpy,
)
from .keyed import ViewError, below, epoch_seed, uniforms
from .times import first_of

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ProgressiveSchedule:
    """How many tokens are shuffled at a training step: 0 before ``i_ar``, 1 there, growing evenly to ``rho_max`` at
    ``i_perm``, constant from there on."""

    i_ar: int
    i_perm: int
    rho_max: int

    def rho(self, step: int) -> int:
        """ρ at a step. (0 and 1 both mean left to right.)"""
        if step < self.i_ar:
            return 0
        if step >= self.i_perm:
            return self.rho_max
        return 1 + (self.rho_max - 1) * (step - self.i_ar) // (self.i_perm - self.i_ar)


OWT = ProgressiveSchedule(i_ar=9_000, i_perm=48_000, rho_max=32)
LM1B = ProgressiveSchedule(i_ar=100_000, i_perm=300_000, rho_max=8)


@dataclass(frozen=True, eq=False)
class OrderExample(Example[ArrayT]):
    """An :class:`~stillhouse.views.example.Example` in the order of generation: index n is the n-th token, not position n.

    ============ ================ ===============================================================================
    input_ids    [B, L] integer   x_{1:N} = π(z): the tokens in their order; also the context, under a mask
    order        [B, L] int64     π: the position of the n-th token (for positional embeddings); padding last
    block        [B, L] int64     B(n), from 1; padding has one more than the last block
    targets      [B, L] bool      everything but padding
    weights      [B, L] float32   1/N, N tokens without padding: γ(t) = 1/T of the paper, whose blocks have size 1
    valid        [B, L] bool      false on padding, in this order
    t            None             unused
    ============ ================ ===============================================================================
    """

    t: None  # type: ignore[assignment]
    order: ArrayT
    block: ArrayT

    def target_ids(self) -> ArrayT:
        """x^I in the order of generation, row after row, [n]; in torch int64, as losses need."""
        ids: Any = self.input_ids
        made: ArrayT = as_labels(ids[self.targets])
        return made

    def _noise(self, options: dict[str, Any]) -> Any:
        # in the order of generation, row after row
        return replay(self.batch, self.order, options)[self.targets]

    def causal(self) -> ArrayT:
        """Own and earlier blocks, Eq. 3: [B, L (query), L (key)] bool. Padding neither attends nor is attended to."""
        block: Any = self.block
        return self._pairs(block[:, None, :] <= block[:, :, None])

    def strictly_causal(self) -> ArrayT:
        """Only earlier blocks, Eq. 5: [B, L (query), L (key)] bool. Rows of the first block have no true entry."""
        block: Any = self.block
        return self._pairs(block[:, None, :] < block[:, :, None])

    def _pairs(self, allowed: Any) -> ArrayT:
        valid: Any = self.valid
        made: ArrayT = allowed & valid[:, :, None] & valid[:, None, :]
        return made


def progressive(
    batch: Batch[ArrayT],
    step: int | None = None,
    *,
    rho: int | None = None,
    schedule: ProgressiveSchedule = OWT,
    seed: int = 0,
    epoch: int | None = None,
) -> OrderExample[ArrayT]:
    """Left to right, with ρ random tokens shuffled among their places (§5): an :class:`OrderExample`, blocks of one token.

    ρ follows from the training ``step`` and ``schedule``, or is ``rho``, as ``orders: {kind: progressive, rho: 8}`` stores it. Purposes: ``armd_places`` (the ρ positions with the smallest
    uniforms are shuffled, so that a growing ρ adds places), ``armd_shuffle`` (their new order: ascending uniforms).
    """
    refuse_loss_mask(batch, "views.armd")
    rows, key = rows_of(batch), epoch_seed(seed, epoch_of(batch, epoch))
    size, length = rows.ids.shape
    if (step is None) == (rho is None):
        raise ViewError(f"step, rho: got {step!r}, {rho!r}, valid: exactly one of them")
    if rho is None:
        assert step is not None
        rho = schedule.rho(step)
    if rho < 0:
        raise ViewError(f"rho: got {rho}, valid: 0 or more")
    order, chosen = _left_to_right(rows), np.zeros((size, length), bool)
    lottery = np.where(rows.valid, uniforms(key, "armd_places", rows.sequence_ids, length), 2.0)
    places = np.argsort(lottery, axis=1, kind="stable")[:, :rho]
    np.put_along_axis(chosen, places, True, axis=1)
    chosen &= rows.valid
    shuffled = np.where(chosen, uniforms(key, "armd_shuffle", rows.sequence_ids, length), 2.0)
    new = np.argsort(shuffled, axis=1, kind="stable")
    for row in range(size):
        count = int(chosen[row].sum())
        # Where the chosen tokens stand left to right, padding not counted.
        rank = np.searchsorted(np.flatnonzero(rows.valid[row]), np.flatnonzero(chosen[row]))
        order[row, rank] = new[row, :count]
    return _example(batch, rows, order, _one_by_one(rows))


def strided(
    batch: Batch[ArrayT],
    *,
    streams: int | Sequence[int] = (1, 2, 4),
    per: Literal["sequence", "step"] = "sequence",
    seed: int = 0,
    epoch: int | None = None,
) -> OrderExample[ArrayT]:
    """S streams, interleaved (§3.1): an :class:`OrderExample`.

    ``streams`` is S, or the values from which S is drawn: ``per="sequence"`` for each sequence and epoch (purpose ``armd_streams``), as stored
    orders are; ``per="step"`` once for all rows of the step, as the paper's fine-tuning does (§5; purpose ``armd_streams_step``), so that rows of equal length
    have one order and one attention mask. The step is the global batch, the same on every rank; without one it is the batch, keyed by the id of its first row.
    Where S does not divide the tokens of a row, the first streams are one token longer.
    """
    refuse_loss_mask(batch, "views.armd")
    rows = rows_of(batch)
    choices = np.atleast_1d(np.asarray(streams, np.int64))
    if choices.ndim != 1 or not len(choices) or (choices < 1).any():
        raise ViewError(f"streams: got {streams!r}, valid: 1 or more, or several of them")
    key = epoch_seed(seed, epoch_of(batch, epoch))
    if per == "sequence":
        drawn = choices[below(key, "armd_streams", rows.sequence_ids, len(choices))]
    elif per == "step":
        ids, stream = first_of(batch, rows)
        drawn = np.repeat(choices[below(key, "armd_streams_step", ids, len(choices), stream)], len(rows.ids))
    else:
        raise ViewError(f"per: got {per!r}, valid: 'sequence', 'step'")
    order, block = _left_to_right(rows), _one_by_one(rows)
    for row, s in enumerate(drawn):
        places = order[row, : rows.valid[row].sum()].copy()
        n = len(places)
        permutation, blocks = strided_order(n, int(s))
        order[row, :n], block[row, :n], block[row, n:] = places[permutation], blocks, blocks.max(initial=0) + 1
    return _example(batch, rows, order, block)


def strided_order(length: int, streams: int) -> tuple[Ints, Ints]:
    """Order (positions from 0) and blocks (from 1) of ``length`` tokens in ``streams`` streams: two int64 [length]."""
    s = max(min(streams, length), 1)
    sizes = length // s + (np.arange(s) < length % s)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    offset = np.arange(length) - np.repeat(starts, sizes)
    stream = np.repeat(np.arange(s), sizes)
    order = np.lexsort((stream, offset)).astype(np.int64)
    # Heads: blocks 1..S; the j-th token of every stream: block S + j.
    block = np.where(offset == 0, stream + 1, s + offset)[order]
    return order, block.astype(np.int64)


def random(batch: Batch[ArrayT], *, steps: int, seed: int = 0, epoch: int | None = None) -> OrderExample[ArrayT]:
    """Random masking (§2): τ of every token uniform in {1..T}, T = ``steps``: an :class:`OrderExample`, see :func:`masking_steps`.

    The bits that ``orders: {kind: random, steps: T}`` stores at epoch 0. Purpose: ``armd_steps``, τ = 1 + ⌊u·T⌋ of the i-th uniform belongs to position i.
    """
    if not 1 <= steps <= 1 << 20:
        raise ViewError(f"steps: got {steps}, valid: 1 to 2^20")
    refuse_loss_mask(batch, "views.armd")
    rows = rows_of(batch)
    drawn = uniforms(epoch_seed(seed, epoch_of(batch, epoch)), "armd_steps", rows.sequence_ids, rows.ids.shape[1])
    return masking_steps(batch, 1 + (drawn * steps).astype(np.int64), steps=steps)


def masking_steps(batch: Batch[ArrayT], tau: Array, *, steps: int | None = None) -> OrderExample[ArrayT]:
    """The order and blocks of masking steps τ ∈ {1..T}, int [B, L] or [L] (§2): an :class:`OrderExample`.

    Positions are sorted by τ descending (masked last = generated first), equal ones by position, and
    B(n) = T − τ(n) + 1. T is ``steps``, by default the largest τ of all rows. The τ of padding is ignored.
    """
    refuse_loss_mask(batch, "views.armd")
    rows = rows_of(batch)
    given = to_numpy(tau).astype(np.int64)
    if given.shape not in (rows.ids.shape, rows.ids.shape[1:]):
        raise ViewError(f"tau: got shape {list(given.shape)}, valid: {list(rows.ids.shape)} or [{rows.ids.shape[1]}]")
    given = np.broadcast_to(given, rows.ids.shape)
    used = given[rows.valid]
    last = int(used.max(initial=1)) if steps is None else steps
    if used.size and not (used.min() >= 1 and used.max() <= last):
        raise ViewError(f"tau: got {used.min()} to {used.max()}, valid: 1 to {last}")
    given = np.where(rows.valid, given, 0)  # padding: after everything, block T + 1
    order = np.argsort(-given, axis=1, kind="stable")
    return _example(batch, rows, order, last - np.take_along_axis(given, order, axis=1) + 1)


def stored(batch: Batch[ArrayT]) -> OrderExample[ArrayT]:
    """The stored columns ``order`` and ``block``, int [B, L]: an :class:`OrderExample`."""
    instead = "draw one with `progressive` or `strided`"
    refuse_loss_mask(batch, "views.armd")
    rows = rows_of(batch)
    columns = [stored_column(batch, column, "orders: {kind: strided}", instead) for column in ("order", "block")]
    order, block = (column.astype(np.int64) for column in columns)
    return _example(batch, rows, order, block)


def _left_to_right(rows: Rows) -> Ints:
    """Positions in their order, padding last: [B, L] int64."""
    return np.argsort(~rows.valid, axis=1, kind="stable").astype(np.int64)


def _one_by_one(rows: Rows) -> Ints:
    """Blocks of one token: 1, 2, ..., N, and N + 1 for padding: [B, L] int64."""
    tokens = rows.valid.sum(axis=1, dtype=np.int64)[:, None]
    return np.asarray(np.minimum(np.arange(1, rows.ids.shape[1] + 1)[None, :], tokens + 1))


def _example(batch: Batch, rows: Rows, order: Ints, block: Ints) -> OrderExample:
    valid: Bools = np.take_along_axis(rows.valid, order, axis=1)
    weights = (valid / np.maximum(valid.sum(axis=1, keepdims=True), 1)).astype(np.float32)
    give = rows.give
    return OrderExample(
        batch,
        give(np.take_along_axis(rows.ids, order, axis=1)),
        give(valid),
        None,
        give(weights),
        give(valid),
        give(order),
        give(block),
    )
