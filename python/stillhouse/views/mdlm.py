"""MDLM (Sahoo et al. 2024): every token is masked on its own with probability 1 − α(t), and the masked ones are predicted.

::

    x          the  cat  sat  on   the  mat          t = 0.5
    input_ids  the   m   sat  m     m   mat          I = {1, 3, 4}, each with the weight w(t) = −α'(t)/(1 − α(t)) = 2

    L = E_t Σ_{i ∈ I} w(t) · (−log p(x^i | x^{−I}, ξ^I))          (MDLM's bound; PGM, Eq. 4; Gumbel distillation, Eq. 7)
"""

from __future__ import annotations

import numpy as np

from ..batch import Array, ArrayT, Batch
from .example import Bools, Example, Floats, Rows, candidates, epoch_of, mask_id_of, refuse_loss_mask, rows_of
from .keyed import epoch_seed, uniforms
from .pgm import Repair, group_weights, groups_of
from .schedule import Doubles, Schedule, schedule_of
from .times import Sampling, given_times, row_times


def mask(
    batch: Batch[ArrayT],
    *,
    seed: int = 0,
    epoch: int | None = None,
    t: float | Array | None = None,
    eps: float = 1e-3,
    sampling: Sampling = "antithetic",
    schedule: Schedule | str | None = None,
    mask_id: int | None = None,
    never: Array | None = None,
) -> Example[ArrayT]:
    """Masks tokens: an :class:`Example`.

    ``t`` is drawn uniformly from [eps, 1) (1e-3 is MDLM's own bound) unless it is given, as one number or [B]; ``sampling``
    says how, see :data:`~stillhouse.views.times.Sampling`: antithetic over the global batch, as MDLM's code does, or for each
    sequence on its own. ``never`` (bool, [B, L] or [L]) excludes positions, as the column ``loss_mask`` of conversations does by itself. ``epoch`` is by default that of the
    batch, ``schedule`` that of the data set, ``mask_id`` the tokenizer's mask token.

    The weights of a row sum to the number of its tokens in expectation, under the linear schedule exactly: E_t[w(t) · (1 − α(t))] is
    (α(eps) − α(1))/(1 − eps).

    Purposes: ``mdlm_t`` (the time), ``mdlm_mask`` (one uniform per position: masked where it is below 1 − α(t)).
    """
    rows, epoch, alpha = rows_of(batch), epoch_of(batch, epoch), schedule_of(schedule, batch.info)
    ids = rows.sequence_ids
    if t is None:
        time = row_times(batch, rows, sampling, seed=seed, epoch=epoch, purpose="mdlm_t", low=eps, high=1.0)
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
    sampling: Sampling = "antithetic",
    repair: Repair = "bounded",
    schedule: Schedule | str | None = None,
    mask_id: int | None = None,
) -> tuple[Example[ArrayT], Example[ArrayT]]:
    """Two examples of every row whose targets are complements of each other (PGM, §5.3).

    The groups and weights are those of :func:`stillhouse.views.pgm.partition`, stored (``view``) or drawn, so that the weights of
    each half sum to the number of tokens in expectation (linear schedule). The first example predicts group 1, which is masked with
    probability 1 − α(t); the second predicts group 0. ``repair="never"`` allows halves without a target, and each half is MDLM's bound except
    for ``eps``; by default every half of a row of two or more tokens has a target, see :data:`~stillhouse.views.pgm.Repair`. ``t`` of a half is the time of its own mask share:
    t, and the t' with 1 − α(t') = α(t).
    """
    refuse_loss_mask(batch, "views.mdlm.complementary")
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
    token, time = mask_id_of(batch, mask_id), groups.t
    other = alpha.time_of(alpha.alpha(time)).astype(np.float32)
    of_zero, of_one = group_weights(rows, groups, alpha)
    first = _example(batch, rows, groups.one & rows.valid, time, of_one, token)
    second = _example(batch, rows, ~groups.one & rows.valid, other, of_zero, token)
    return first, second


def _example(batch: Batch, rows: Rows, targets: Bools, t: Floats, weight: Doubles, token: int) -> Example:
    masked = np.where(targets, np.asarray(token, rows.ids.dtype), rows.ids)
    weights = np.where(targets, weight.astype(np.float32)[:, None], np.float32(0))
    give = rows.give
    return Example(batch, give(masked), give(targets), give(t), give(weights), give(rows.valid))
