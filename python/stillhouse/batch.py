"""Rows of a data set in memory: a dictionary of arrays, numpy or torch, that knows the data set it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from .errors import ColumnError
from .info import Info
from .place import GlobalBatch

if TYPE_CHECKING:
    import torch

Array = Union[np.ndarray, "torch.Tensor"]


class Ragged:
    """Rows of different lengths: ``values`` [n] of all rows one after the other, ``offsets`` [B+1] int64 where they begin.

    ``ragged[i]`` is row i, a view. Both arrays are numpy or both are torch.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: Any, offsets: Any) -> None:
        self.values = values
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Any:
        size = len(self)
        if not -size <= row < size:
            raise IndexError(f"row {row} of {size}")
        row %= size
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values, {self.values.dtype})"

    @property
    def lengths(self) -> Any:
        """Values of each row, [B] int64."""
        return self.offsets[1:] - self.offsets[:-1]

    def pin_memory(self, device: Any = None) -> Ragged:
        """For ``DataLoader(pin_memory=True)``."""
        return Ragged(self.values.pin_memory(), self.offsets.pin_memory())

    def to(self, *args: Any, **kwargs: Any) -> Ragged:
        """``torch.Tensor.to`` of both arrays (the offsets keep their type)."""
        values = self.values.to(*args, **kwargs)
        return Ragged(values, self.offsets.to(values.device))


class Batch(dict[str, Any]):
    """Columns by name: arrays [B, ...] in the shape of the column, :class:`Ragged` where rows differ in length.

    ``info`` holds what noise and views must know of the data set. ``state``, where a data set of :mod:`stillhouse.torch`
    made the batch, is what ``load_state_dict`` takes to go on right after this batch; ``global_batch`` says of which rows of all ranks
    these are a part. All stay with the batch through ``to``, ``torch``, pickling and ``pin_memory``.
    """

    info: Info | None
    state: dict[str, Any] | None
    global_batch: GlobalBatch | None

    def __init__(
        self,
        columns: Mapping[str, Any] = {},
        info: Info | None = None,
        state: dict[str, Any] | None = None,
        global_batch: GlobalBatch | None = None,
    ) -> None:
        super().__init__(columns)
        self.info = info
        self.state = state
        self.global_batch = global_batch

    def __missing__(self, column: str) -> Any:
        raise ColumnError(f"the batch has no column {column!r}; it has {', '.join(self) or 'none'}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Batch, (dict(self), self.info, self.state, self.global_batch))

    def __copy__(self) -> Batch:
        return Batch(self, self.info, self.state, self.global_batch)

    @property
    def rows(self) -> int:
        """B."""
        return len(next(iter(self.values()))) if self else 0

    def to(self, *args: Any, **kwargs: Any) -> Batch:
        """``torch.Tensor.to`` of every column, such as ``batch.to("cuda", non_blocking=True)``."""
        columns = {name: value.to(*args, **kwargs) for name, value in self.items()}
        return Batch(columns, self.info, self.state, self.global_batch)

    def padded(self, length: int | None = None, pad_id: int | None = None) -> Batch:
        """Rows of different lengths (``pack.remainder: keep``) made equal: every column [B, L, ...], padding at the end.

        ``length`` is L, by default that of the longest row. ``input_ids`` are padded with ``pad_id`` (by default the tokenizer's ``pad``, else 0),
        everything else with 0, and ``attention_mask`` says what is padding. A batch of equal rows is given back as it is.
        """
        ids = self["input_ids"]
        if not isinstance(ids, Ragged):
            return self
        if is_torch(ids):
            return self.numpy().padded(length, pad_id).torch().to(ids.values.device)
        lengths = ids.lengths
        longest = int(lengths.max(initial=0))
        if length is not None and length < longest:
            raise ValueError(f"length: got {length}, valid: {longest} or more, the longest row")
        valid = np.arange(length or longest) < lengths[:, None]
        if pad_id is None:
            pad_id = 0 if self.info is None else self.info.special_tokens.get("pad", 0)
        made = {name: _pad(name, column, lengths, valid) for name, column in self.items()}
        made["input_ids"][~valid] = pad_id
        made["attention_mask"] = valid
        return Batch(made, self.info, self.state, self.global_batch)

    def torch(self) -> Batch:
        """The same columns as torch tensors, without a copy where torch has full support for the type.

        Types that torch can hardly compute with are widened: uint16 to int32, uint32 to int64; ``sequence_id`` and other
        uint64 become int64 with the same bits.
        """
        columns = {name: _to_torch(value) for name, value in self.items()}
        return Batch(columns, self.info, self.state, self.global_batch)

    def numpy(self) -> Batch:
        """The same columns as numpy arrays (of tensors on a GPU: copies). Types stay as they are."""
        columns = {name: _to_numpy(value) for name, value in self.items()}
        return Batch(columns, self.info, self.state, self.global_batch)


# columns with values for every position: before it (draws, views) or after it (digits, top-k)
_BEFORE = ("noise_count", "partition")
_AFTER = ("input_ids", "attention_mask", "logprob", "topk_index", "topk_logprob", "subtokens", "order", "block")


def _pad(name: str, column: Any, lengths: Any, valid: Any) -> Any:
    """A column with its positions padded; one without positions as it is."""
    if not isinstance(column, Ragged) or name not in _BEFORE + _AFTER + ("noise",):
        return column
    rows, length = valid.shape
    each = int(column.lengths.max(initial=0) // max(int(lengths.max(initial=0)), 1)) or 1
    if name in _AFTER:
        flat = np.zeros((rows, length, each), column.values.dtype)
        if name == "order":  # padding comes last, in its place
            flat[:] = np.arange(length, dtype=flat.dtype)[:, None]
        if name == "block":  # and after every block
            flat[:] = np.asarray([row.max(initial=0) + 1 for row in column], flat.dtype)[:, None, None]
        flat[valid] = column.values.reshape(-1, each)
        return flat[:, :, 0] if each == 1 else flat
    if name == "noise":  # [D, L, V]: V is not known here, so it is padded row by row
        raise ColumnError("noise: dense noise of rows of different lengths cannot be padded; leave the column out")
    padded = np.zeros((rows, each, length), column.values.dtype)
    for row, (values, size) in enumerate(zip(column, lengths)):
        padded[row, :, :size] = values.reshape(each, size)
    return padded


def is_torch(value: Any) -> bool:
    """Whether a column or array is of torch, without importing torch."""
    if isinstance(value, Ragged):
        value = value.values
    return type(value).__module__.partition(".")[0] == "torch"


_WIDER = {"uint16": np.int32, "uint32": np.int64}


def _to_torch(value: Any) -> Any:
    import torch

    if isinstance(value, Ragged):
        return Ragged(_to_torch(value.values), _to_torch(value.offsets))
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == np.uint64:
        value = value.view(np.int64)
    elif value.dtype.name in _WIDER:
        value = value.astype(_WIDER[value.dtype.name])
    if not value.flags.writeable:
        value = value.copy()
    return torch.from_numpy(value)


def _to_numpy(value: Any) -> Any:
    if isinstance(value, Ragged):
        return Ragged(_to_numpy(value.values), _to_numpy(value.offsets))
    return value.detach().cpu().numpy() if is_torch(value) else value
