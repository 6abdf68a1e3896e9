"""Medusa heads (Cai et al. 2024): from position i, k heads predict the next k tokens at once.

::

    position     0    1    2    3    4    5
    x           the  cat  sat  on   the  mat
    i = 1             ▲    1    2    3            I = {i + 1, ..., i + k}, k = 3          (Gumbel distillation, §4.2)

"Offsets 1–3, head 0 uses the frozen base LM head" (§5.2) can be read in two ways, and both have a name:

=============== ==================== =====================================================================================
``offsets``     head j of k predicts
=============== ==================== =====================================================================================
``"next"``      i + j, j = 1..k      I = {i + 1..i + k} of §4.2: offsets count from the last token of the context. The default
``"lookahead"`` i + 1 + j, j = 1..k  Medusa's own and appendix C.2: the base's head (head 0) has the token i + 1, and only the
                                     heads that look further ahead are trained: I = {i + 2..i + k + 1}
=============== ==================== =====================================================================================

``"next"`` with one head more has head 0 among its heads and the same tokens as ``"lookahead"`` after it. ``first`` says the first offset as a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..batch import Array, ArrayT, Batch
from .example import Example, refuse_loss_mask, replay, rows_of, to_numpy
from .keyed import ViewError

OFFSETS = {"next": 1, "lookahead": 2}
"""The first offset of each reading."""

IGNORED = -100
"""The id of a target that does not exist; torch's cross-entropy leaves it out by default."""


@dataclass(frozen=True, eq=False)
class HeadExample(Example[ArrayT]):
    """Targets of k heads from P anchors of every row.

    ========== =================== =======================================================================
    input_ids  [B, L] integer      the clean sequence, for a causal model: anchor i sees x^{≤ i}
    anchors    [B, P] int64        the positions i
    positions  [B, P, k] int64     the positions i + first + head; where there is none, the last one of the row
    targets    [B, P, k] bool      whether there is one: inside the row and no padding
    weights    [B, P, k] float32   1 at targets, 0 elsewhere
    t          None                unused
    ========== =================== =======================================================================

    ``noise()`` is [B, P, k, V], zero where there is no target. It is large for all anchors of long rows: pass fewer ``anchors``.
    """

    t: None  # type: ignore[assignment]
    anchors: ArrayT
    positions: ArrayT

    def target_ids(self) -> ArrayT:
        """x^I: [B, P, k] int64, −100 where there is no target."""
        rows = rows_of(self.batch)
        positions, targets = to_numpy(self.positions), to_numpy(self.targets)
        ids = rows.ids[np.arange(len(rows.ids))[:, None, None], positions].astype(np.int64)
        made: ArrayT = rows.give(np.where(targets, ids, IGNORED))
        return made

    def target_weights(self) -> ArrayT:
        """The weights, [B, P, k]."""
        return self.weights

    def _noise(self, options: dict[str, Any]) -> Any:
        """[B, P, k, V], zero where there is no target.

        A token is replayed once even where several heads predict it, when P · k is more than L.
        """
        rows, positions = rows_of(self.batch), to_numpy(self.positions)
        size, anchors, heads = positions.shape
        length = rows.ids.shape[1]
        if anchors * heads <= length:
            flat = replay(self.batch, rows.give(positions.reshape(size, -1)), options)
            noise = flat.reshape(size, anchors, heads, flat.shape[-1])
        else:
            every = replay(self.batch, rows.give(np.tile(np.arange(length), (size, 1))), options)
            row = np.arange(size)[:, None, None]
            noise = every[rows.give(row), self.positions]
        targets: Any = self.targets
        noise[~targets] = 0
        return noise


def targets(
    batch: Batch[ArrayT],
    *,
    heads: int = 3,
    offsets: Literal["next", "lookahead"] | None = None,
    first: int | None = None,
    anchors: Array | None = None,
) -> HeadExample[ArrayT]:
    """The targets of ``heads`` heads (k) with the offsets ``"next"`` (the default) or ``"lookahead"``: a :class:`HeadExample`.

    ``first`` instead of ``offsets``: the first head predicts i + ``first``, the others the tokens behind.
    ``anchors``, int [P] or [B, P], are the positions i; by default all L. Nothing is random.
    """
    if offsets is not None and first is not None:
        raise ViewError(f"offsets, first: got {offsets!r} and {first}, valid: one of them")
    if offsets is not None and offsets not in OFFSETS:
        raise ViewError(f"offsets: got {offsets!r}, valid: {', '.join(map(repr, OFFSETS))}")
    if first is None:
        first = OFFSETS[offsets or "next"]
    if heads < 1 or first < 1:
        raise ViewError(f"heads, first: got {heads}, {first}, valid: 1 or more")
    refuse_loss_mask(batch, "views.medusa")
    rows = rows_of(batch)
    size, length = rows.ids.shape
    at = np.arange(length) if anchors is None else to_numpy(anchors).astype(np.int64)
    if at.size and not (at.min() >= 0 and at.max() < length):
        raise ViewError(f"anchors: got {at.min()} to {at.max()}, valid: 0 to {length - 1}")
    if at.ndim not in (1, 2) or (at.ndim == 2 and len(at) != size):
        raise ViewError(f"anchors: got shape {list(at.shape)}, valid: [P] or [{size}, P]")
    at = np.broadcast_to(at, (size, at.shape[-1]))
    wanted = at[:, :, None] + np.arange(first, first + heads)
    positions = np.minimum(wanted, length - 1)
    row = np.arange(size)[:, None, None]
    there = (wanted < length) & rows.valid[row, positions]
    give = rows.give
    return HeadExample(
        batch,
        give(rows.ids),
        give(there),
        None,
        give(there.astype(np.float32)),
        give(rows.valid),
        give(at),
        give(positions),
    )
