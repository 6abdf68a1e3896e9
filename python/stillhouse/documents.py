"""Where documents begin in packed rows, in the forms that attention takes: lengths, position ids, masks.

::

    input_ids        a0 a1 a2 </s> b0 b1 </s> c0 | c1 c2 </s> pad        two rows of one batch
    document_offsets 0             4          7  | 0
    segments         0  0  0  0    1  1  1    2  | 0  0  0    -1         int32 [B, L]
    position_ids     0  1  2  3    0  1  2    0  | 0  1  2    3          where a job says `context: document`
    cu_seqlens       0             4          7    8          11  12     int32, over the flattened batch [B·L]

``document_offsets`` divides a row into segments. A segment is a document, or a part of one (docs/FORMAT.md); it never
continues in the next row. Padding belongs to no segment.

Results are of the batch's library (numpy or torch) and device. They are computed on the CPU from the offsets, so compute
them before ``batch.to("cuda")``: this avoids copying the offsets back from the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .batch import LOST, ArrayT, Batch, Ragged, is_torch
from .errors import ColumnError, StillhouseError

if TYPE_CHECKING:
    import torch

Context = Literal["sequence", "document"]
"""Where a new context begins: with every row, or with every segment of it."""


class Lengths(NamedTuple, Generic[ArrayT]):
    """What attention over sequences of different lengths takes.

    ``cu_seqlens`` [segments + 1] int32: where each begins in the flattened batch, and the end of the last;
    ``max_seqlen``: the length of the longest.
    """

    cu_seqlens: ArrayT
    max_seqlen: int


def cu_seqlens(batch: Batch[ArrayT], *, context: Context = "document") -> Lengths[ArrayT]:
    """Bounds of the segments in the flattened batch, as ``flash_attn_varlen_func`` takes them: :class:`Lengths`.

    The flattened batch is ``x.reshape(B * L, ...)``, or the ``values`` of rows of different lengths (``pack.remainder: keep``), without
    :meth:`~stillhouse.Batch.padded`. Padding at the end of a row is a sequence of its own, so that no token sees it. ``context="sequence"``
    gives the bounds of rows instead. Whether attention is causal is an argument of the attention function.
    """
    found = _found(batch, context)
    bounds = np.append(np.flatnonzero(found.begins), found.tokens)
    longest = int(np.diff(bounds).max(initial=0))
    return Lengths(found.give(bounds.astype(np.int32)), longest)


def segments(batch: Batch[ArrayT]) -> ArrayT:
    """The number of the segment in its row, from 0; −1 on padding: [B, L] int32 (a :class:`~stillhouse.Ragged` of ragged rows)."""
    found = _found(batch, "document")
    made: ArrayT = found.shaped(np.where(found.valid, found.numbers, -1).astype(np.int32))
    return made


def position_ids(batch: Batch[ArrayT], *, context: Context | None = None) -> ArrayT:
    """Positions from 0: [B, L], int64 in torch, int32 in numpy (a :class:`~stillhouse.Ragged` of ragged rows).

    They restart at 0 where the teacher's context did: at every segment if the job has ``extract: {context: document}``,
    else only at the start of the row. ``context`` overrides this. Positions continue through padding.
    """
    if context is None:
        if batch.info is None:
            raise StillhouseError(f"context: not given, and {LOST}; or pass context=")
        context = batch.info.context
    found = _found(batch, context, padding=False)
    starts = np.flatnonzero(found.begins)
    places = np.arange(found.tokens) - np.repeat(starts, np.diff(np.append(starts, found.tokens)))
    made: ArrayT = found.shaped(places.astype(np.int64 if found.device is not None else np.int32))
    return made


def document_mask(batch: Batch[ArrayT], *, causal: bool = False, context: Context = "document") -> ArrayT:
    """Which token attends to which: [B, L (query), L (key)] bool, true within a segment; with ``causal``, not to later tokens.

    Padding neither attends nor is attended to: its rows have no true entry, and torch's attention returns 0 there. The mask
    has L² values per row; for long rows, use :func:`mask_mod` or :func:`cu_seqlens`, which cost almost nothing.
    """
    numbers = _numbers(batch, context)
    mask = (numbers[:, :, None] == numbers[:, None, :]) & (numbers[:, :, None] >= 0)
    if causal:
        length = numbers.shape[1]
        if is_torch(mask):
            import torch

            mask &= torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        else:
            mask &= np.tri(length, dtype=bool)
    made: ArrayT = mask
    return made


def mask_mod(
    batch: Batch[torch.Tensor], *, causal: bool = False, context: Context = "document", copies: int = 1
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """:func:`document_mask` as FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)``.

    ::

        mod = documents.mask_mod(batch, causal=True)
        blocks = create_block_mask(mod, B=batch.rows, H=None, Q_LEN=L, KV_LEN=L, device=device)
        out = flex_attention(query, key, value, block_mask=blocks)

    Combine it with other masks by ``torch.nn.attention.flex_attention.and_masks``. ``copies`` is the number of copies of
    the sequence in the input, one after the other: 2 for BD3-LM's [x_t, x_0],
    ``and_masks(example.mask_mod(), documents.mask_mod(batch, copies=2))``. The function holds [B, L] int32 on the batch's
    device.
    """
    numbers = _numbers(batch, context)
    if not is_torch(numbers):
        raise TypeError(
            "batch: got arrays of numpy, valid: tensors (batch.torch()), because FlexAttention is part of torch"
        )
    if copies < 1:
        raise ValueError(f"copies: got {copies}, valid: 1 or more")
    length = numbers.shape[1]

    def allowed(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        query, key = (q_idx % length, kv_idx % length) if copies > 1 else (q_idx, kv_idx)
        number = numbers[b, query]
        same: torch.Tensor = (number == numbers[b, key]) & (number >= 0)
        return same & (query >= key) if causal else same

    return allowed


def _numbers(batch: Batch[Any], context: Context) -> Any:
    """Segments [B, L], or one for the whole row."""
    if isinstance(batch.get("input_ids"), Ragged):
        raise ColumnError("input_ids: rows differ in length (`pack.remainder: keep`); a mask needs batch.padded()")
    found = _found(batch, context)
    return found.shaped(np.where(found.valid, found.numbers, -1).astype(np.int32))


@dataclass(frozen=True)
class _Found:
    """The tokens of a batch, flattened: [n], n = B·L, or what ragged rows hold."""

    begins: npt.NDArray[np.bool_]  # whether a segment (or the padding of a row) begins here
    numbers: npt.NDArray[np.int64]  # of the segment in its row
    valid: npt.NDArray[np.bool_]
    shape: tuple[int, int] | None  # [B, L]; None: ragged
    offsets: Any  # of ragged rows
    device: torch.device | None

    @property
    def tokens(self) -> int:
        return len(self.begins)

    def give(self, array: npt.NDArray[Any]) -> Any:
        if self.device is None:
            return array
        import torch

        return torch.from_numpy(array).to(self.device)

    def shaped(self, array: npt.NDArray[Any]) -> Any:
        return Ragged(self.give(array), self.offsets) if self.shape is None else self.give(array.reshape(self.shape))


def _found(batch: Batch[Any], context: Context, padding: bool = True) -> _Found:
    """Reads ``input_ids`` (for the shape), ``attention_mask`` and ``document_offsets``."""
    if context not in ("sequence", "document"):
        raise ValueError(f"context: got {context!r}, valid: 'sequence', 'document'")
    ids: Any = batch["input_ids"]
    device = (ids.values if isinstance(ids, Ragged) else ids).device if is_torch(ids) else None
    rows = len(ids)
    if isinstance(ids, Ragged):
        bounds, shape, offsets = _numpy(ids.offsets).astype(np.int64), None, ids.offsets
    else:
        bounds, shape, offsets = np.arange(rows + 1) * ids.shape[1], (rows, int(ids.shape[1])), None
    tokens = int(bounds[-1])
    mask = batch.get("attention_mask")
    valid = np.ones(tokens, bool) if mask is None else _numpy(mask.values if isinstance(mask, Ragged) else mask)
    valid = valid.reshape(-1).astype(bool)
    begins = np.zeros(tokens, bool)
    lengths = np.diff(bounds)
    if context == "document":
        begins[_starts(batch, bounds, lengths)] = True
    else:
        begins[bounds[:-1][lengths > 0]] = True
    row = np.repeat(np.arange(rows), lengths)
    counted = np.cumsum(begins)
    numbers = counted - counted[np.minimum(bounds[:-1], max(tokens - 1, 0))][row] if tokens else counted
    if padding and tokens:
        before = np.append(True, valid[:-1]) & (row == np.append(-1, row[:-1]))
        begins |= ~valid & before
    return _Found(begins, numbers, valid, shape, offsets, device)


def _starts(batch: Batch[Any], bounds: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where segments begin in the flattened batch, checked."""
    column = batch.get("document_offsets")
    if not isinstance(column, Ragged):
        have = ", ".join(batch) or "none"
        raise ColumnError(
            "the batch has no column 'document_offsets' of different lengths, which says where documents begin: every data set has it, and "
            f"it must be among the columns that are read; the batch has {have}"
        )
    starts, values = _numpy(column.offsets).astype(np.int64), _numpy(column.values).astype(np.int64)
    row = np.repeat(np.arange(len(column)), np.diff(starts))
    first = np.zeros(len(values), bool)
    first[starts[:-1][np.diff(starts) > 0]] = True
    if len(column) != len(lengths) or (np.diff(starts) < 1).any():
        raise ColumnError(
            f"document_offsets: got {len(column)} rows, valid: {len(lengths)}, each with one offset or more"
        )
    ascending = first | (values > np.append(-1, values[:-1]))
    wrong = (first & (values != 0)) | ~ascending | (values >= lengths[row])
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ColumnError(
            f"document_offsets: got {values[at]} in row {row[at]} of the batch, valid: ascending from 0, below {lengths[row[at]]}"
        )
    found: npt.NDArray[np.int64] = bounds[row] + values
    return found


def _numpy(value: Any) -> npt.NDArray[Any]:
    return np.asarray(value.detach().cpu().numpy() if is_torch(value) else value)
