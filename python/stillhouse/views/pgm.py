"""PGM (Deschenaux et al. 2025): tokens in two groups, each predicted from the other; no masks.

::

    x          the  cat  sat  on   the  mat        t = 0.5: P(g = 1) = 1 − α(t)
    g           0    1    1   0     0    1
    sorted      the  on   the | cat  sat  mat      the encoder's attention is block-diagonal: 3 × 3, 3 × 3
                group 0       | group 1            the decoder's (GroupSwap) is the other two blocks

Every token is a target, so that Σ weights runs over the whole row. See :data:`Weighting` for a trap in the paper's Eq. 6, and
:data:`Repair` for groups without a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..batch import ArrayT, Batch
from .example import (
    Bools,
    Example,
    Floats,
    Rows,
    epoch_of,
    refuse_loss_mask,
    rows_of,
    stored_column,
    to_numpy,
)
from .keyed import GOLDEN, U64, ViewError, below, epoch_seed, integers, shuffles, uniforms, unit
from .schedule import LINEAR, Doubles, Schedule, schedule_of
from .times import Sampling, row_times, stored_time

Weighting = Literal["eq6", "bound"]
"""Which weight belongs to which group.

``"bound"``, the default: each token has the weight that MDLM's bound gives it. A token of group 1 is hidden from group 0,
which predicts it, with probability 1 − α(t), so it has w(t); one of group 0 has −α'(t)/α(t), which is w(1 − t) for the linear
schedule. These are the weights of :func:`stillhouse.views.mdlm.complementary`, and of the code that the authors published
(github.com/jdeschena/pgm, ``algo.py``: group 1 gets w(t)). Under the linear schedule the weights of a row of n tokens (L without padding) sum to
2 n in expectation, n for each group, whatever ``eps`` and :data:`Repair`; that code takes half of it. (Other schedules:
2 n · (α(eps) − α(1 − eps))/(1 − 2 eps).)

``"eq6"``: the paper's Eq. 6 as it is printed: w(t) where g = 0, w(1 − t) where g = 1. Read for the token that is predicted, its
expected sum has no bound: for small t nearly all tokens are in group 0 and get 1 / t. The text before the equation speaks of the group
that predicts.
"""

Repair = Literal["bounded", "never"]
"""How to treat a row of n ≥ 2 tokens that all fall into one group: no token would have a context to be predicted from.

``"bounded"``, the default, and what data sets store: one token, chosen evenly, changes its group. A token is then in group 1 with probability
q(t) = p + ((1 − p)^n − p^n)/n, p = 1 − α(t), and ``"bound"`` weighs it by −α'(t)/q(t), one of group 0 by −α'(t)/(1 − q(t)): the weights have
the sum that they should have, and none exceeds n·|α'(t)|. (With w(t) = −α'(t)/p a lone token at t = eps would weigh 1/eps, and the
sum of n = 16 tokens would be 22 % too large.) The two weights differ where 1/n is not small against p: for n = 1,024 by 1.5 % at t = 0.003.

``"never"``: groups as they are drawn, empty ones too, as in the authors' code, with the weights w(t) and −α'(t)/α(t), up to 1/eps. Rows with an
empty group have queries that may attend to nothing (:meth:`PartitionExample.attention`, ``"swap"``); most implementations of softmax return NaN for them.
"""


@dataclass(frozen=True)
class Groups:
    """A partition of every row: ``one`` [B, L] bool, true for group 1; ``t`` [B] float32; whether empty groups got a token."""

    one: Bools
    t: Floats
    repaired: bool


@dataclass(frozen=True, eq=False)
class PartitionExample(Example[ArrayT]):
    """An :class:`~stillhouse.views.example.Example` whose targets are all tokens and whose input is the clean sequence.

    ============ ================ =========================================================================
    groups       [B, L] bool      true for group 1; false on padding
    permutation  [B, L] int64     positions sorted by group: group 0 in their order, group 1, then padding
    sizes        [B, 2] int64     tokens in group 0 and in group 1
    sorted_ids   [B, L] integer   ``input_ids`` in the order of ``permutation``
    ============ ================ =========================================================================
    """

    groups: ArrayT
    permutation: ArrayT
    sizes: ArrayT
    sorted_ids: ArrayT

    def sorted(self, values: ArrayT) -> ArrayT:
        """Values [B, L] or [B, L, ...] of positions, such as ``weights``, in the order of ``permutation``."""
        given: Any = values
        rows: Any
        order: Any
        if isinstance(values, np.ndarray):
            rows, order = np.arange(len(given))[:, None], to_numpy(self.permutation)
        else:
            import torch

            rows, order = torch.arange(len(given), device=given.device)[:, None], self.permutation
        made: ArrayT = given[rows, order]
        return made

    def attention(
        self, kind: Literal["group", "swap"] = "group", *, order: Literal["sorted", "position"] = "sorted"
    ) -> ArrayT:
        """What may be attended to: [B, L (query), L (key)] bool.

        ``"group"``: tokens of the own group (encoder). ``"swap"``: tokens of the other group (GroupSwap and decoder), so
        that what is predicted at a position never depends on its group. Padding neither attends nor is attended to: its
        rows have no true entry.
        """
        group: Any = self.groups
        valid: Any = self.valid
        if order == "sorted":
            group, valid = self.sorted(group), self.sorted(valid)
        same = group[:, :, None] == group[:, None, :]
        made: ArrayT = (same if kind == "group" else ~same) & valid[:, :, None] & valid[:, None, :]
        return made


def partition(
    batch: Batch[ArrayT],
    *,
    view: int | None = None,
    seed: int = 0,
    epoch: int | None = None,
    eps: float = 1e-3,
    sampling: Sampling = "antithetic",
    repair: Repair = "bounded",
    schedule: Schedule | str | None = None,
    weighting: Weighting = "bound",
) -> PartitionExample[ArrayT]:
    """Two groups of every row: a :class:`PartitionExample`.

    ``view`` takes that view of the stored columns ``partition`` and ``partition_t``, whatever ``epoch``, ``seed`` and ``sampling``.
    Without it a partition is drawn, t uniform in [eps, 1 − eps]: antithetic over the global batch, as the authors' code does, or with
    ``sampling="sequence"`` for each sequence on its own by the algorithm of the operator (at epoch 0 and with the job's seed these
    are the bits that ``partitions: {views: 1}`` stores). See :data:`~stillhouse.views.times.Sampling`, :data:`Repair` and :data:`Weighting`.

    Purposes: ``partition_t`` (the time), ``partition_group`` (one uniform per position), ``partition_repair``.
    """
    refuse_loss_mask(batch, "views.pgm.partition")
    rows, alpha = rows_of(batch), schedule_of(schedule, batch.info)
    groups = groups_of(
        batch,
        rows,
        view=view,
        seed=seed,
        epoch=epoch_of(batch, epoch),
        eps=eps,
        sampling=sampling,
        repair=repair,
        schedule=alpha,
    )
    t, one = groups.t, groups.one
    if weighting == "eq6":
        of_zero, of_one = alpha.weight(t), alpha.weight(1.0 - t.astype(np.float64))
    elif weighting == "bound":
        of_zero, of_one = group_weights(rows, groups, alpha)
    else:
        raise ViewError(f"weighting: got {weighting!r}, valid: 'eq6', 'bound'")
    weights = np.where(one, of_one[:, None], of_zero[:, None]).astype(np.float32) * rows.valid
    rank = np.where(rows.valid, one.astype(np.int8), np.int8(2))
    permutation = np.argsort(rank, axis=1, kind="stable")
    sizes = np.stack([(rank == 0).sum(axis=1), (rank == 1).sum(axis=1)], axis=1)
    give = rows.give
    return PartitionExample(
        batch,
        give(rows.ids),
        give(rows.valid),
        give(t),
        give(weights),
        give(rows.valid),
        give(one),
        give(permutation),
        give(sizes),
        give(np.take_along_axis(rows.ids, permutation, axis=1)),
    )


def groups_of(
    batch: Batch,
    rows: Rows,
    *,
    view: int | None,
    seed: int,
    epoch: int,
    eps: float,
    sampling: Sampling,
    repair: Repair,
    schedule: Schedule,
) -> Groups:
    """The groups of a stored view, or drawn ones."""
    if repair not in ("bounded", "never"):
        raise ViewError(f"repair: got {repair!r}, valid: 'bounded', 'never'")
    if view is None:
        t = row_times(batch, rows, sampling, seed=seed, epoch=epoch, purpose="partition_t", low=eps, high=1.0 - eps)
        key, repaired = epoch_seed(seed, epoch), repair == "bounded"
        return Groups(draw_groups(rows.sequence_ids, rows.valid, t, key, schedule, 0, repaired), t, repaired)
    if repair == "never":
        raise ViewError(
            "repair: got 'never', valid with a stored view: 'bounded', because stored groups are repaired; or leave out "
            "`view` to draw groups"
        )
    instead = "leave out `view` to draw one"
    one = stored_column(batch, "partition", "partitions: {views: 2}", instead).astype(bool)
    t = stored_column(batch, "partition_t", "partitions: {views: 2}", instead).astype(np.float32)
    if not 0 <= view < one.shape[1]:
        raise ViewError(f"view: got {view}, valid: 0 to {one.shape[1] - 1}, the views this data set stores")
    return Groups(one[:, view] & rows.valid, t[:, view], True)


def group_weights(rows: Rows, groups: Groups, schedule: Schedule) -> tuple[Doubles, Doubles]:
    """The weight of a token of group 0 and of group 1 in MDLM's bound, [B] each: −α'(t) over the probability to be in the group."""
    if not groups.repaired:
        return schedule.complement_weight(groups.t), schedule.weight(groups.t)
    tokens, one, zero = rows.valid.sum(axis=1), schedule.share(groups.t), schedule.alpha(groups.t)
    # What an empty group gets of the other one, which a row of one token cannot give.
    moved = np.where(tokens >= 2, (zero**tokens - one**tokens) / np.maximum(tokens, 1), 0.0)
    slope = -schedule.derivative(groups.t)
    return slope / (zero - moved), slope / (one + moved)


def draw_partitions(
    sequence_ids: U64,
    valid: Bools,
    *,
    views: int = 1,
    seed: int = 0,
    epoch: int = 0,
    eps: float = 1e-3,
    schedule: Schedule = LINEAR,
    stratified: bool = True,
) -> tuple[Bools, Floats]:
    """What the operator ``partitions`` stores: ``partition`` [B, views, L] bool and ``partition_t`` [B, views] float32.

    Purposes ``partition_strata``, ``partition_t``, ``partition_group`` and ``partition_repair``, see docs/FORMAT.md.
    """
    key = epoch_seed(seed, epoch)
    strata = shuffles(key, "partition_strata", sequence_ids, views)
    turn = np.uint64(epoch * GOLDEN & (1 << 64) - 1)
    groups, t = [], []
    for view in range(views):
        # As in `times`: t turns with the epoch inside its stratum.
        part = unit(integers(seed, "partition_t", sequence_ids, 1, view)[:, 0] + turn)
        if stratified:
            part = (strata[:, view] + part) / views
        t.append(stored_time(eps + (1.0 - 2.0 * eps) * part, eps, 1.0 - eps))
        groups.append(draw_groups(sequence_ids, valid, t[-1], key, schedule, view))
    return np.stack(groups, axis=1), np.stack(t, axis=1)


def draw_groups(
    sequence_ids: U64, valid: Bools, t: Floats, key: int, schedule: Schedule, view: int, repair: bool = True
) -> Bools:
    """Group 1 of every row, [B, L] bool, with the share 1 − α(t); ``repair``: an empty group of two or more tokens gets one."""
    one = uniforms(key, "partition_group", sequence_ids, valid.shape[1], view) < schedule.share(t)[:, None]
    one &= valid
    if not repair:
        return one
    tokens, ones = valid.sum(axis=1), one.sum(axis=1)
    rows = np.flatnonzero((tokens >= 2) & ((ones == 0) | (ones == tokens)))
    nth = below(key, "partition_repair", sequence_ids[rows], tokens[rows], view)
    moved = ((np.cumsum(valid[rows], axis=1) == nth[:, None] + 1) & valid[rows]).argmax(axis=1)
    one[rows, moved] ^= True
    return one
