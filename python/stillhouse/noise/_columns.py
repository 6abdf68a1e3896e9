"""What replay needs of a batch: its columns checked and in one shape, and the asked tokens as numbers row·L + position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..batch import LOST, Batch, Ragged, is_torch
from ..errors import ColumnError, StillhouseError
from ..info import Info

_MADE_BY = {
    "sequence_id": "every data set has it; it must be among the columns that are read",
    "input_ids": "every data set has it; it must be among the columns that are read",
    "logprob": "the job makes it with a section `extract:`",
    "noise_count": "the job makes it with `extract: {noise: {codec: replay}}`",
    "noise_index": "the job makes it with `extract: {noise: {codec: replay}}`",
    "noise_logprob": "the job makes it with `extract: {noise: {codec: replay}}`",
    "noise": "the job makes it with `extract: {noise: {codec: dense}}`",
}


@dataclass(frozen=True)
class Stored:
    """The noise columns of B rows of L positions, numpy or torch alike. ``noise`` for codec dense, the others for replay;
    of those only ``sequence_id`` and ``input_ids`` for prior noise, of which nothing is stored."""

    rows: int
    draws: int
    length: int
    vocab: int
    seed: int
    draw: int
    sequence_id: Any = None  # [B]
    input_ids: Any = None  # [B, L]
    logprob: Any = None  # [B, L]
    count: Any = None  # [B, D, L]
    index: Any = None  # [*]
    values: Any = None  # [*]
    offsets: Any = None  # [B + 1]
    noise: Any = None  # [B, D, L, V]

    def map(self, convert: Any) -> Stored:
        """The same with every array converted."""
        arrays = ("sequence_id", "input_ids", "logprob", "count", "index", "values", "offsets", "noise")
        changed = {name: None if getattr(self, name) is None else convert(getattr(self, name)) for name in arrays}
        return Stored(self.rows, self.draws, self.length, self.vocab, self.seed, self.draw, **changed)


def _kind(array: Any) -> str:
    """``i`` for integers, ``f`` for floating point, of numpy and torch alike."""
    name = str(array.dtype).removeprefix("torch.")
    return "f" if "float" in name else "i" if "int" in name else name


def _column(batch: Mapping[str, Any], name: str, kind: str, ragged: bool = False) -> Any:
    if name not in batch:
        have = ", ".join(batch) or "none"
        raise ColumnError(f"replaying noise needs the column {name!r} ({_MADE_BY[name]}); the batch has {have}")
    value = batch[name]
    if isinstance(value, Ragged) != ragged:
        if ragged:
            raise ColumnError(
                f"column {name!r} is {type(value).__name__}, expected a Ragged (values [n], offsets [B+1])"
            )
        raise ColumnError(
            f"the rows of column {name!r} differ in length, replay needs [B, L]: "
            "take batch.padded(), or pack with `remainder: drop` or `pad`"
        )
    array = value.values if ragged else value
    if not hasattr(array, "dtype"):
        raise ColumnError(f"column {name!r} is {type(array).__name__}, expected a numpy array or a torch tensor")
    if _kind(array) != kind:
        raise ColumnError(
            f"column {name!r} is of {array.dtype}, expected {'an integer' if kind == 'i' else 'a float'} type"
        )
    return value


def _expect(name: str, array: Any, shape: tuple[int, ...], letters: str) -> None:
    if tuple(array.shape) != shape:
        raise ColumnError(f"column {name!r} has shape {list(array.shape)}, expected {letters} = {list(shape)}")


def _with_draws(name: str, array: Any, draws: int, rank: int, letters: str) -> Any:
    """The column as [B, D, ...]: with one draw its axis may be missing."""
    if array.ndim == rank - 1 and draws == 1:
        return array[:, None]
    if array.ndim == rank and array.shape[1] == draws:
        return array
    raise ColumnError(f"column {name!r} has shape {list(array.shape)}, expected {letters} with D = {draws} draws")


def stored(batch: Mapping[str, Any], info: Info | None, draw: int) -> Stored:
    """Takes the noise columns out of a batch and checks types and shapes (values are checked where they are used)."""
    if info is None:
        info = batch.info if isinstance(batch, Batch) else None
    if info is None:
        raise StillhouseError(
            "replaying noise needs facts of the data set (vocabulary size, seed): give a stillhouse.Batch with its info, "
            f"or info=stillhouse.Info(...) such as dataset.info. {LOST if isinstance(batch, Batch) else ''}".rstrip()
        )
    facts = info.noise
    if facts is None:
        raise StillhouseError("the data set has no noise: its job has no `extract: {noise: ...}`")
    if isinstance(draw, bool) or not isinstance(draw, (int, np.integer)) or not 0 <= draw < facts.draws:
        raise ValueError(f"draw is {draw!r}, expected 0 to {facts.draws - 1}: the data set has {facts.draws} draw(s)")
    draws, vocab, seed, draw = facts.draws, info.vocab_size, facts.seed % 2**64, int(draw)
    if facts.codec == "dense":
        noise = _with_draws("noise", _column(batch, "noise", "f"), draws, 4, "[B, D, L, V]")
        if noise.shape[3] != vocab:
            raise ColumnError(f"column 'noise' has {noise.shape[3]} values per token, the vocabulary has {vocab}")
        rows, length = noise.shape[0], noise.shape[2]
        return Stored(rows, draws, length, vocab, seed, draw, noise=noise)
    if facts.codec not in ("replay", "prior"):
        raise StillhouseError(f"unknown codec of noise {facts.codec!r}, expected 'replay', 'dense' or 'prior'")
    input_ids = _column(batch, "input_ids", "i")
    if input_ids.ndim != 2:
        raise ColumnError(f"column 'input_ids' has shape {list(input_ids.shape)}, expected [B, L]")
    rows, length = input_ids.shape
    sequence_id = _column(batch, "sequence_id", "i")
    _expect("sequence_id", sequence_id, (rows,), "[B]")
    if str(sequence_id.dtype).removeprefix("torch.") not in ("uint64", "int64"):
        raise ColumnError(
            f"column 'sequence_id' is of {sequence_id.dtype}, expected uint64 (or int64 of the same bits)"
        )
    if facts.codec == "prior":
        return Stored(rows, draws, length, vocab, seed, draw, sequence_id, input_ids)
    logprob = _column(batch, "logprob", "f")
    _expect("logprob", logprob, (rows, length), "[B, L]")
    count = _with_draws("noise_count", _column(batch, "noise_count", "i"), draws, 3, "[B, D, L]")
    _expect("noise_count", count, (rows, draws, length), "[B, D, L]")
    index, values = _column(batch, "noise_index", "i", ragged=True), _column(batch, "noise_logprob", "f", ragged=True)
    for name, column in (("noise_index", index), ("noise_logprob", values)):
        _expect(f"{name}.offsets", column.offsets, (rows + 1,), "[B + 1]")
    if len(index.values) != len(values.values):
        raise ColumnError(f"noise_index holds {len(index.values)} values, noise_logprob {len(values.values)}")
    return Stored(
        rows, draws, length, vocab, seed, draw,
        sequence_id, input_ids, logprob, count, index.values, values.values, index.offsets,
    )  # fmt: skip


def asked(positions: Any, rows: int, length: int) -> tuple[Any, tuple[int, ...]]:
    """The asked tokens as int64 numbers row·L + position (None for all), and the leading shape of the output.

    ``positions``: None, bool [B, L], or integers [B, P]. Arrays of torch stay on their device; whether integers there are
    in range is checked together with the columns.
    """
    if positions is None:
        return None, (rows, length)
    if not is_torch(positions):
        positions = np.asarray(positions)
    torch = is_torch(positions)
    kind = str(positions.dtype).removeprefix("torch.")
    shape = tuple(positions.shape)
    if kind == "bool":
        if shape != (rows, length):
            raise ValueError(f"positions is a mask of shape {list(shape)}, expected [B, L] = {[rows, length]}")
        flat = positions.reshape(-1).nonzero()
        numbers = flat[:, 0] if torch else flat[0]
        return numbers, (len(numbers),)
    if "int" not in kind:
        raise ValueError(f"positions is of {positions.dtype}, expected bool [B, L] or integers [B, P]")
    if len(shape) != 2 or shape[0] != rows:
        raise ValueError(f"positions has shape {list(shape)}, expected [B, P] with B = {rows}")
    if torch:
        import torch as pt

        positions = positions.to(pt.int64)
        first = pt.arange(rows, device=positions.device)[:, None] * length
        inside = (positions >= 0) & (positions < length)
        # Out of range stays out of range: it must not turn into a position of another row.
        return pt.where(inside, positions + first, -1).reshape(-1), shape
    positions = positions.astype(np.int64)
    outside = (positions < 0) | (positions >= length)
    if outside.any():
        raise ValueError(f"position {int(positions[outside][0])} is out of range (0 to {length - 1})")
    return (positions + np.arange(rows)[:, None] * length).reshape(-1), shape


def of_written(stored: Stored, tokens: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Sequence ids (uint64) and positions (int64), both [n], of the asked tokens of text that the teacher wrote."""

    def host(array: Any) -> Any:
        return array.detach().cpu().numpy() if is_torch(array) else np.asarray(array)

    numbers = np.arange(stored.rows * stored.length) if tokens is None else host(tokens).astype(np.int64)
    if (numbers < 0).any():
        raise ValueError(f"a position is out of range (0 to {stored.length - 1})")
    ids = np.ascontiguousarray(host(stored.sequence_id)).view(np.uint64)
    return ids[numbers // stored.length], numbers % stored.length
