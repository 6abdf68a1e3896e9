"""Rows of a data set in memory: a dictionary of arrays, numpy or torch, that knows the data set it comes from."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Union, overload

import numpy as np
import numpy.typing as npt

from .errors import ColumnError
from .info import Info
from .place import GlobalBatch

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self
    from typing_extensions import TypeVar as TypeVarWithDefault

    ArrayT = TypeVarWithDefault("ArrayT", default=Any)
else:
    ArrayT = TypeVar("ArrayT")

Array = Union[np.ndarray, "torch.Tensor"]
NumpyArray = npt.NDArray[Any]
_Facts = tuple[Info | None, dict[str, Any] | None, GlobalBatch | None]
Rows = Union[slice, Sequence[int], Sequence[bool], np.ndarray, "torch.Tensor"]
"""Which rows: a slice, their numbers [b] in any order (negative ones count from the end), or bool [B]."""

DenseColumn = Literal[
    "sequence_id", "input_ids", "attention_mask", "loss_mask", "logprob", "noise_count", "noise", "topk_index", "topk_logprob",
    "logz", "entropy", "candidate_logprob", "sampled_count", "top_p_count", "top_p_tail", "hidden_states", "given", "subtokens",
    "partition", "partition_t", "order", "block", "label",
]  # fmt: skip
RaggedColumn = Literal[
    "document_offsets", "document_ids", "noise_index", "noise_logprob", "sampled_index", "sampled_times", "sampled_ratio", "top_p_index",
    "top_p_logprob",
]  # fmt: skip


class Ragged(Generic[ArrayT]):
    """Rows of different lengths: ``values`` [n] of all rows, concatenated; ``offsets`` [B+1] int64: where each row begins.

    ``ragged[i]`` is row i, a view; ``ragged[2:5]``, ``ragged[[3, 1]]`` and ``ragged[mask]`` (bool [B]) are rows as a Ragged, a slice
    without a copy of the values. Both arrays are numpy or both are torch.
    """

    __slots__ = ("offsets", "values")

    values: ArrayT
    offsets: ArrayT

    def __init__(self, values: ArrayT, offsets: ArrayT) -> None:
        self.values = values
        self.offsets = offsets

    def __len__(self) -> int:
        offsets: Any = self.offsets
        return len(offsets) - 1

    @overload
    def __getitem__(self, rows: int | np.integer[Any]) -> ArrayT: ...
    @overload
    def __getitem__(self, rows: Rows) -> Ragged[ArrayT]: ...
    def __getitem__(self, rows: int | np.integer[Any] | Rows) -> ArrayT | Ragged[ArrayT]:
        values: Any = self.values
        offsets: Any = self.offsets
        chosen = chosen_rows(rows, len(self)) if not _is_number(rows) else operator.index(rows)  # type: ignore[arg-type]
        if isinstance(chosen, int):
            size = len(self)
            if not -size <= chosen < size:
                raise IndexError(f"row: got {chosen}, valid: {-size} to {size - 1}")
            chosen %= size
            row: ArrayT = values[int(offsets[chosen]) : int(offsets[chosen + 1])]
            return row
        if isinstance(chosen, slice):
            bounds = offsets[chosen.start : chosen.stop + 1]
            return Ragged(values[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0])
        known = _to_numpy(offsets)
        lengths = np.diff(known)[chosen]
        made = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(known[chosen] - made[:-1], lengths) + np.arange(made[-1])
        return Ragged(values[_like(places, values)], _like(made, offsets))

    def __iter__(self) -> Iterator[ArrayT]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        values: Any = self.values
        return f"Ragged({len(self)} rows, {len(values)} values, {values.dtype})"

    @property
    def lengths(self) -> ArrayT:
        """Values of each row, [B] int64."""
        offsets: Any = self.offsets
        lengths: ArrayT = offsets[1:] - offsets[:-1]
        return lengths

    def pin_memory(self, device: Any = None) -> Ragged[torch.Tensor]:
        """For ``DataLoader(pin_memory=True)``."""
        return Ragged(_pinned(self.values), _pinned(self.offsets))

    def to(self, *args: Any, **kwargs: Any) -> Ragged[torch.Tensor]:
        """``torch.Tensor.to`` of both arrays; a type converts only floating-point values."""
        values = moved(self.values, args, kwargs)
        return Ragged(values, _to_torch(self.offsets).to(values.device))

    def split(self, rows: int) -> list[Ragged[ArrayT]]:
        """Parts of ``rows`` rows each, the last one with the rest, without copies of the values."""
        return [self[start : start + rows] for start in parts_of(len(self), rows)]

    @staticmethod
    def concat(parts: Sequence[Ragged[ArrayT]]) -> Ragged[ArrayT]:
        """The rows of all parts, concatenated."""
        lengths = np.concatenate([np.diff(_to_numpy(part.offsets)) for part in parts])
        first: Any = parts[0].offsets
        offsets = _like(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), first)
        return Ragged(joined([part.values for part in parts]), offsets)


class Batch(dict[str, Any], Generic[ArrayT]):
    """Columns by name: arrays [B, ...] in the shape of the column, :class:`Ragged` where rows differ in length.

    ``batch["logprob"]`` is a column. ``batch[2:5]``, ``batch[[3, 1]]`` and ``batch[mask]`` (bool [B]) are rows as a
    batch; ``batch[3]`` is one row as a dictionary.

    - ``info`` has the facts of the data set that noise and views need.
    - ``state`` is what ``load_state_dict`` takes to continue right after this batch, if a data set of
      :mod:`stillhouse.torch` or :class:`stillhouse.Epochs` made it. The state of a part of a batch continues after the
      whole batch.
    - ``global_batch`` says which rows these are of the rows that all ranks get in one step.

    These facts stay with the batch through ``to``, ``torch``, ``pin_memory``, slices, ``split``, ``copy``, ``|`` and
    pickling. The tensors of ``sequence_id`` and ``input_ids`` carry them too: a new ``Batch`` that contains one of these
    very tensors gets the facts again (transformers' Trainer makes such batches). A copy of the tensor, for example on
    another device, does not carry them.

    For type checkers a batch is ``Batch[numpy array]`` or ``Batch[torch.Tensor]``. Subscripts are typed for rows of one length; with
    ``pack.remainder: keep`` columns with positions are :class:`Ragged` until :meth:`padded`.
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
        if info is None and state is None:
            info, state, noted = self._noted_facts()
            global_batch = noted if global_batch is None else global_batch
        self.info = info
        self.state = state
        self.global_batch = global_batch
        self._note_facts()

    def _bearers(self) -> list[Any]:
        columns = (self.get(name) for name in _BEARERS)
        return [column for column in columns if is_torch(column) and not isinstance(column, Ragged)]

    def _noted_facts(self) -> _Facts:
        for column in self._bearers():
            if column in _facts_of_tensors():
                facts: _Facts = _facts_of_tensors()[column]
                return facts
        return None, None, None

    def _note_facts(self) -> None:
        if self.info is not None or self.state is not None:
            for column in self._bearers():
                _facts_of_tensors()[column] = (self.info, self.state, self.global_batch)

    @overload
    def __getitem__(self, key: RaggedColumn) -> Ragged[ArrayT]: ...
    @overload
    def __getitem__(self, key: DenseColumn) -> ArrayT: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: Rows) -> Self: ...
    def __getitem__(self, key: str | int | Rows) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        if _is_number(key):
            row = operator.index(key)  # type: ignore[arg-type]
            return {name: column[row] for name, column in self.items()}
        chosen = chosen_rows(key, self.rows)
        place = self.global_batch
        if place is not None:
            # the place of a batch that is not as long as it says stays wrong, for views to refuse
            place = place.take(chosen) if place.held_rows == self.rows else place
        columns = {name: taken(column, chosen) for name, column in self.items()}
        return type(self)(columns, self.info, self.state, place)

    def __missing__(self, column: str) -> Any:
        raise ColumnError(f"the batch has no column {column!r}; it has {', '.join(self) or 'none'}")

    def _with(self, columns: Mapping[str, Any]) -> Any:
        return type(self)(columns, self.info, self.state, self.global_batch)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (dict(self), self.info, self.state, self.global_batch))

    def copy(self) -> Self:
        """A new batch of the same columns."""
        made: Self = self._with(self)
        return made

    __copy__ = copy

    def __or__(self, other: Mapping[str, Any]) -> Self:  # type: ignore[override]
        made: Self = self._with({**self, **other})
        return made

    def __ror__(self, other: Mapping[str, Any]) -> Self:  # type: ignore[override]
        made: Self = self._with({**other, **self})
        return made

    @property
    def rows(self) -> int:
        """B."""
        return len(next(iter(self.values()))) if self else 0

    def to(self, *args: Any, **kwargs: Any) -> Batch[torch.Tensor]:
        """``torch.Tensor.to`` of every column, such as ``batch.to("cuda", non_blocking=True)``; numpy arrays become tensors first.

        A type (``torch.bfloat16``) converts only floating-point columns.
        """
        made: Batch[torch.Tensor] = self._with(
            {name: value.to(*args, **kwargs) if isinstance(value, Ragged) else moved(value, args, kwargs)
             for name, value in self.items()}
        )  # fmt: skip
        return made

    def pin_memory(self, device: Any = None) -> Batch[torch.Tensor]:
        """The same columns in page-locked memory, which allows asynchronous copies to a GPU; needs an accelerator."""
        made: Batch[torch.Tensor] = self._with({name: _pinned(value) for name, value in self.items()})
        return made

    def split(self, rows: int) -> list[Self]:
        """Micro-batches of ``rows`` rows each, the last one with the rest, without copies.

        Losses that are summed (not averaged) over the rows of each micro-batch add up to the loss of the whole batch.
        Divide them by a number of the whole batch, such as its tokens.
        """
        return [self[start : start + rows] for start in parts_of(self.rows, rows)]

    @classmethod
    def concat(cls, batches: Sequence[Batch[ArrayT]]) -> Self:
        """The rows of all batches, concatenated.

        The state is that of the last batch. ``global_batch`` is None unless all are parts of one batch.

        Raises ``ValueError`` for batches of different data sets or columns.
        """
        if not batches:
            raise ValueError("batches: got none, valid: at least one")
        first = batches[0]
        for batch in batches[1:]:
            if batch.keys() != first.keys():
                raise ValueError(f"batches: got columns {', '.join(batch)}, valid: {', '.join(first)}, as in the first")
            if batch.info != first.info:
                raise ValueError(f"batches: got facts {batch.info}, valid: {first.info}, as in the first")
        columns = {name: joined([batch[name] for batch in batches]) for name in first}
        place = GlobalBatch.joined([batch.global_batch for batch in batches])
        return cls(columns, first.info, batches[-1].state, place)

    def padded(self, length: int | None = None, pad_id: int | None = None) -> Self:
        """Pads rows of different lengths (``pack.remainder: keep``) at the end, so that every column is [B, L, ...].

        ``length`` is L, by default the length of the longest row. ``input_ids`` are padded with ``pad_id`` (default: the
        tokenizer's ``pad``, else 0), all other columns with 0, and ``attention_mask`` is false on padding.
        ``hidden_states`` become [B, L, layers · H]. A batch whose rows have equal lengths is returned unchanged.
        """
        ids: Any = self["input_ids"]
        if not isinstance(ids, Ragged):
            return self
        if is_torch(ids):
            tensors: Any = self.numpy().padded(length, pad_id).torch().to(ids.values.device)
            return tensors  # type: ignore[no-any-return]
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
        return self._with(made)  # type: ignore[no-any-return]

    def torch(self) -> Batch[torch.Tensor]:
        """The same columns as torch tensors, without a copy where torch has full support for the type.

        Types that torch supports poorly are widened: uint16 to int32, uint32 to int64; ``sequence_id`` and other uint64
        become int64 with the same bits. ``input_ids`` stay int32, which ``nn.Embedding`` takes; losses need int64, the type
        of ``target_ids()`` of an example.
        """
        made: Batch[torch.Tensor] = self._with({name: _to_torch(value) for name, value in self.items()})
        return made

    def numpy(self) -> Batch[NumpyArray]:
        """The same columns as numpy arrays (of tensors on a GPU: copies). Types stay as they are."""
        made: Batch[NumpyArray] = self._with({name: _to_numpy(value) for name, value in self.items()})
        return made


LOST = (
    "the batch has no facts (info, state) of its data set. They are lost when other code makes a new batch of the columns, as transformers' "
    "Trainer does when it moves tensors. Make the example earlier, in the `transform` of the data set or in the collate function, or pass "
    "the facts again: stillhouse.Batch(columns, info=dataset.info, state=state)"
)
"""What a view or noise says of a batch without facts."""

# With these tensors go info and state, for those who take a batch apart and make a new one of its columns.
_BEARERS = ("sequence_id", "input_ids")


@functools.cache
def _facts_of_tensors() -> Any:
    """(info, state, global batch) by tensor, as long as the tensor lives. (An attribute of the tensor would be pickled with it.)"""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


# columns with values for every position: before it (draws, views) or after it (digits, top-k, layers and components)
_BEFORE = ("noise_count", "partition")
_AFTER = (
    "input_ids", "attention_mask", "loss_mask", "logprob", "topk_index", "topk_logprob", "logz", "entropy", "candidate_logprob",
    "sampled_count", "top_p_count", "top_p_tail", "hidden_states", "subtokens", "order", "block",
)  # fmt: skip


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


def _like(array: NumpyArray, pattern: Any) -> Any:
    """A numpy array as another one is: numpy, or torch on its device."""
    if not is_torch(pattern):
        return array
    import torch

    return torch.from_numpy(array).to(pattern.device)


def moved(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """``Tensor.to``, where a type is for floating point alone: ids and masks keep theirs."""
    tensor: torch.Tensor = _to_torch(value)
    there: torch.Tensor = tensor.to(*args, **kwargs)
    if there.dtype != tensor.dtype and not (tensor.is_floating_point() and there.is_floating_point()):
        return tensor.to(there.device)
    return there


def _pinned(value: Any) -> Any:
    return value.pin_memory() if isinstance(value, Ragged) else _to_torch(value).pin_memory()


def _is_number(key: Any) -> bool:
    """Whether a key is one row: an integer of Python or numpy, or a tensor that holds one."""
    if isinstance(key, (int, np.integer)):
        return True
    return getattr(key, "ndim", None) == 0


def chosen_rows(rows: Any, size: int) -> slice | npt.NDArray[np.int64]:
    """Rows as a slice with bounds and without a step, or as numbers from 0: [b] int64."""
    if isinstance(rows, slice):
        start, stop, step = rows.indices(size)
        return slice(start, max(start, stop)) if step == 1 else np.arange(start, stop, step)
    given = np.asarray(_to_numpy(rows))
    if given.ndim == 1 and not given.size:
        given = given.astype(np.int64)
    if given.ndim != 1 or given.dtype.kind not in "biu":
        raise TypeError(
            f"rows: got {given.dtype} of shape {list(given.shape)}, valid: a slice, integers [b] or bool [{size}]"
        )
    if given.dtype.kind == "b":
        if len(given) != size:
            raise IndexError(f"rows: got bool [{len(given)}], valid: bool [{size}], one for each row")
        return np.flatnonzero(given)
    numbers = given.astype(np.int64)
    wrong = numbers[(numbers < -size) | (numbers >= size)]
    if wrong.size:
        raise IndexError(f"row: got {wrong[0]}, valid: {-size} to {size - 1}")
    return np.where(numbers < 0, numbers + size, numbers)


def taken(column: Any, chosen: slice | npt.NDArray[np.int64]) -> Any:
    """Rows of an array or a :class:`Ragged`; chosen by :func:`chosen_rows`."""
    if isinstance(column, Ragged) or isinstance(chosen, slice):
        return column[chosen]
    return column[_like(chosen, column)]


def parts_of(size: int, rows: int) -> range:
    """Where parts of so many rows begin."""
    if rows < 1:
        raise ValueError(f"rows: got {rows}, valid: 1 or more")
    return range(0, size, rows)


def joined(parts: Sequence[Any]) -> Any:
    """Arrays of numpy or torch, or :class:`Ragged`, one after the other."""
    if isinstance(parts[0], Ragged):
        return Ragged.concat(parts)
    if is_torch(parts[0]):
        import torch

        return torch.cat(list(parts))
    return np.concatenate(parts)
