"""BD3-LM (Arriola et al. 2025): blocks of L' tokens in order, and masked diffusion with a time of its own in every block.

::

    block            0            |      1            L' = 3, t = (0.3, 0.7)
    x           the  cat  sat     | on   the  mat
    input_ids   the   m   sat     |  m    m   mat     block 1 is predicted from clean block 0 and noised block 1

    L = Σ_b L_MDLM(x^b | x^{<b}, ξ^b)          (Gumbel distillation, Eq. 8 and 9; L' = 4 and 16)

One forward pass over [x_t, x_0] (2 L tokens) trains all blocks; :func:`block_attention` is its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..batch import Array, ArrayT, Batch, is_torch
from .example import WITH_INFO, Bools, Example, candidates, epoch_of, mask_id_of, rows_of, stored_column
from .keyed import ViewError, epoch_seed, uniforms
from .schedule import Schedule, schedule_of
from .times import Sampling, batch_times, given_times

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class BlockExample(Example[ArrayT]):
    """An :class:`~stillhouse.views.example.Example` in blocks: ``t`` is [B, blocks] float32, ``block_size`` is L'.

    The last block is shorter where L' does not divide L. ``targets`` are the masked positions of all blocks.
    """

    block_size: int
    mask_id: int

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        t: Any = self.t
        return int(t.shape[1])

    def block(self, block: int) -> BlockExample[ArrayT]:
        """One block alone: its masked positions are the targets, earlier blocks are clean, and later ones are hidden.

        Later positions hold ``mask_id`` and are no targets; a trainer may cut them off with ``[:, : (block + 1) * L']``.
        """
        if not 0 <= block < self.blocks:
            raise ViewError(f"block: got {block}, valid: 0 to {self.blocks - 1}")
        start, stop = block * self.block_size, (block + 1) * self.block_size
        rows = rows_of(self.batch)
        inside = np.zeros(rows.ids.shape[1], bool)
        inside[start:stop] = True
        inside = rows.give(inside)
        noised: Any = self.input_ids
        targets: Any = self.targets
        weights: Any = self.weights
        input_ids = rows.give(rows.ids.copy())
        input_ids[:, start:stop] = noised[:, start:stop]
        input_ids[:, stop:] = self.mask_id
        return replace(self, input_ids=input_ids, targets=targets & inside, weights=weights * inside)

    def noised_and_clean(self) -> ArrayT:
        """[x_t, x_0]: the noised and the clean sequence one after the other, [B, 2 L]."""
        rows = rows_of(self.batch)
        clean = rows.give(rows.ids)
        noised: Any = self.input_ids
        made: Any
        if rows.device is None:
            made = np.concatenate([noised, clean], axis=1)
        else:
            import torch

            made = torch.cat([noised, clean], dim=1)
        return made  # type: ignore[no-any-return]

    def attention(self) -> ArrayT:
        """:func:`block_attention` without padding: [B, 2 L (query), 2 L (key)] bool."""
        rows = rows_of(self.batch)
        valid = np.concatenate([rows.valid, rows.valid], axis=1)
        allowed = block_attention(rows.ids.shape[1], self.block_size)
        made: ArrayT = rows.give(allowed & valid[:, :, None] & valid[:, None, :])
        return made

    def mask_mod(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """:meth:`attention` as FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)`` over 2 L positions.

        Combine it with :func:`stillhouse.documents.mask_mod` (``copies=2``) to keep attention within documents.
        """
        valid: Any = self.valid
        if not is_torch(valid):
            raise TypeError(
                "example: got arrays of numpy, valid: tensors (of batch.torch()), because FlexAttention is part of torch"
            )
        length, size = valid.shape[1], self.block_size

        def allowed(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
            query, key = q_idx % length, kv_idx % length
            clean_query, clean_key = q_idx >= length, kv_idx >= length
            ahead = query // size - key // size  # how many blocks the query comes after the key
            own = (clean_query == clean_key) & (ahead == 0)
            seen: torch.Tensor = (own | (clean_key & (ahead > 0))) & valid[b, query] & valid[b, key]
            return seen

        return allowed


def mask(
    batch: Batch[ArrayT],
    *,
    block_size: int,
    seed: int = 0,
    epoch: int | None = None,
    t: float | Array | None = None,
    t_range: tuple[float, float] = (1e-3, 1.0),
    sampling: Sampling = "antithetic",
    schedule: Schedule | str | None = None,
    mask_id: int | None = None,
    never: Array | None = None,
) -> BlockExample[ArrayT]:
    """Masks tokens inside blocks of ``block_size`` (L'): a :class:`BlockExample`.

    t of every block is drawn uniformly from ``t_range``. The default is MDLM's; a narrower one clips the schedule, as
    BD3-LM's paper does for small L'. (BD3-LM's code also redraws the masks of a block until their share is in the range;
    this function does not.) ``t`` sets the time instead, as one number or [B]. ``never`` excludes positions (BD3-LM's code
    never masks a BOS at the start). The weight is w(t) of the block, and the weights of a row sum to the number of its tokens in
    expectation (linear schedule, any ``t_range``).

    ``sampling``: antithetic over all blocks of the global batch, as BD3-LM's code does, or for each sequence on its own; see
    :data:`~stillhouse.views.times.Sampling`. (Neighbouring blocks have neighbouring strata in that code; here the blocks of a row are spread.)

    Purposes: ``bd3lm_t`` (one number per block), ``bd3lm_mask`` (one per position).
    """
    if block_size < 1:
        raise ViewError(f"block_size: got {block_size}, valid: 1 or more")
    rows, epoch, alpha = rows_of(batch), epoch_of(batch, epoch), schedule_of(schedule, batch.info)
    ids, length = rows.sequence_ids, rows.ids.shape[1]
    blocks = -(-length // block_size)
    if t is None:
        low, high = t_range
        time = batch_times(batch, rows, sampling, blocks, seed=seed, epoch=epoch, purpose="bd3lm_t", low=low, high=high)
    else:
        time = np.repeat(given_times(t, len(ids))[:, None], blocks, axis=1)
    block = np.arange(length) // block_size
    drawn = uniforms(epoch_seed(seed, epoch), "bd3lm_mask", ids, length)
    targets = (drawn < alpha.share(time)[:, block]) & candidates(rows, never)
    token = mask_id_of(batch, mask_id)
    masked = np.where(targets, np.asarray(token, rows.ids.dtype), rows.ids)
    weights = np.where(targets, alpha.weight(time).astype(np.float32)[:, block], np.float32(0))
    give = rows.give
    return BlockExample(
        batch, give(masked), give(targets), give(time), give(weights), give(rows.valid), block_size, token
    )


def stored(
    batch: Batch[ArrayT],
    view: int = 0,
    *,
    schedule: Schedule | str | None = None,
    mask_id: int | None = None,
    never: Array | None = None,
) -> BlockExample[ArrayT]:
    """The stored columns ``partition`` and ``partition_t`` of ``partitions: {level: block, block_length: 4}``: a :class:`BlockExample`.

    Group 1 is masked. ``views: 1`` stores what :func:`mask` draws with the job's seed at epoch 0, ``sampling="sequence"`` and ``t_range=(eps, 1 - eps)``.
    """
    block_size = block_length_of(batch)
    instead = "draw masks with `mask`"
    section = "partitions: {level: block, block_length: 4}"
    groups = stored_column(batch, "partition", section, instead)
    times = stored_column(batch, "partition_t", section, instead)
    length = groups.shape[-1]
    blocks = -(-length // block_size)
    views = groups.shape[1] if groups.ndim == 3 else 0
    # rows that are all shorter than L have times for the blocks of L
    if groups.ndim != 3 or times.shape[:2] != (len(groups), views) or times.shape[-1] < blocks:
        raise ViewError(
            f"partition_t: got shape {list(times.shape)}, valid: [{len(groups)}, {views}, {blocks}], a time for each block of {block_size} tokens"
        )
    if not 0 <= view < views:
        raise ViewError(f"view: got {view}, valid: 0 to {views - 1}")
    rows, alpha = rows_of(batch), schedule_of(schedule, batch.info)
    targets = groups[:, view].astype(bool) & candidates(rows, never)
    time = times[:, view, :blocks].astype(np.float32)
    block = np.arange(length) // block_size
    token = mask_id_of(batch, mask_id)
    masked = np.where(targets, np.asarray(token, rows.ids.dtype), rows.ids)
    weights = np.where(targets, alpha.weight(time).astype(np.float32)[:, block], np.float32(0))
    give = rows.give
    return BlockExample(
        batch, give(masked), give(targets), give(time), give(weights), give(rows.valid), block_size, token
    )


def block_length_of(batch: Batch) -> int:
    """L' of the stored partitions of a batch."""
    if batch.info is None:
        raise ViewError(f"batch: has no info, which has the length of its blocks; valid: {WITH_INFO}")
    if batch.info.block_length is None:
        raise ViewError(
            "batch: its data set stores no blocks; valid: a data set of a job with `partitions: {level: block, block_length: 4}`"
        )
    return batch.info.block_length


def block_attention(length: int, block_size: int) -> Bools:
    """The attention mask over [x_t, x_0] of the block diffusion paper: [2 L (query), 2 L (key)] bool, numpy.

    ::

                     key x_t            key x_0
        query x_t    own block (M_BD)   earlier blocks (M_OBC)
        query x_0    nothing            own and earlier blocks (M_BC)
    """
    block = np.arange(length) // block_size
    query, key = block[:, None], block[None, :]
    nothing = np.zeros((length, length), bool)
    return np.block([[query == key, query > key], [nothing, query >= key]])
