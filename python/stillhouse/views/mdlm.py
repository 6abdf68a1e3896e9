"""MDLM (Sahoo et al. 2024): every token is masked on its own with probability 1 − α(t), and the masked ones are predicted.

::

    x          the  cat  sat  on   the  mat          t = 0.5
    input_ids  the   m   sat  m     m   mat          I = {1, 3, 4}, each with the weight w(t) = −α'(t)/(1 − α(t)) = 2

    L = E_t Σ_{i ∈ I} w(t) · (−log p(x^i | x^{−I}, ξ^I))          (MDLM's bound; PGM, Eq. 4; Gumbel distillation, Eq. 7)
"""

from __future__ import annotations

import numpy as np

from ..batch import Array, ArrayT, Batch
from .example import Bools, Example, Floats, Rows, candidates, epoch_of, given_times, mask_id_of, rows_of, times
from .keyed import epoch_seed, uniforms
from .pgm import Groups, groups_of
from .schedule import Doubles, Schedule, schedule_of


def mask(
    batch: Batch[ArrayT],
    *,
    seed: int = 0,
    epoch: int | None = None,
    t: float | Array | None = None,
    eps: float = 1e-3,
    schedule: Schedule | str | None = None,
    mask_id: int | None = None,
    never: Array | None = None,
) -> Example[ArrayT]:
    """Masks tokens: an :class:`Example`.

    ``t`` is drawn uniformly from [eps, 1) for each sequence and epoch (1e-3 is MDLM's own bound) unless it is given, as
    one number or [B]. ``never`` (bool, [B, L] or [L]) excludes positions, such as a prompt. ``epoch`` is by default that
    of the data set's state, ``schedule`` that of the data set, ``mask_id`` the tokenizer's mask token.

    Purposes: ``mdlm_t`` (the time), ``mdlm_mask`` (one uniform per position: masked where it is below 1 − α(t)).
    """
    rows, epoch, alpha = rows_of(batch), epoch_of(batch, epoch), schedule_of(schedule, batch.info)
    ids = rows.sequence_ids
    if t is None:
        time = times(ids, 1, seed=seed, epoch=epoch, purpose="mdlm_t", low=eps, high=1.0)[:, 0]
    else:
        time = given_times(t, len(ids))
    drawn = uniforms(epoch_seed(seed, epoch), "mdlm_mask", ids, rows.ids.shape[1])
    targets = (drawn < alpha.share(time)[:, None]) & candidates(rows, never)
    return _example(batch, rows, targets, time, alpha.weight(time), mask_id_of(batch, mask_id))


def complementary(
    batch: Batch[ArrayT],
    *,
    view: int | None = None,
    seed: int = 0,
    epoch: int | None = None,
    eps: float = 1e-3,
    schedule: Schedule | str | None = None,
    mask_id: int | None = None,
) -> tuple[Example[ArrayT], Example[ArrayT]]:
    """Two examples of every row whose targets are complements of each other (PGM, §5.3).

    The groups are those of :func:`stillhouse.views.pgm.partition`, stored (``view``) or drawn. The first example
    predicts group 1, which is masked with probability 1 − α(t), with the weight w(t); the second predicts group 0 with
    the weight of the complement, −α'(t)/α(t), which is w(1 − t) for the linear schedule. Each half alone is a bound as
    MDLM's, up to ``eps`` and to the token that a group gets instead of being empty, which adds about ln(1/(L·eps))/L to the
    mean weight where L·eps < 1. Its ``t`` is the time of its own mask share: t, and the t' with 1 − α(t') = α(t).
    """
    rows, alpha = rows_of(batch), schedule_of(schedule, batch.info)
    groups: Groups = groups_of(batch, rows, view=view, seed=seed, epoch=epoch_of(batch, epoch), eps=eps, schedule=alpha)
    token, time = mask_id_of(batch, mask_id), groups.t
    other = alpha.time_of(alpha.alpha(time)).astype(np.float32)
    first = _example(batch, rows, groups.one & rows.valid, time, alpha.weight(time), token)
    second = _example(batch, rows, ~groups.one & rows.valid, other, alpha.complement_weight(time), token)
    return first, second


def _example(batch: Batch, rows: Rows, targets: Bools, t: Floats, weight: Doubles, token: int) -> Example:
    masked = np.where(targets, np.asarray(token, rows.ids.dtype), rows.ids)
    weights = np.where(targets, weight.astype(np.float32)[:, None], np.float32(0))
    give = rows.give
    return Example(batch, give(masked), give(targets), give(t), give(weights), give(rows.valid))
