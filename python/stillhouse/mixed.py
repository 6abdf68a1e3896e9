"""Batches with rows of several data sets: joining them, splitting them, and the keys of their random choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .batch import Batch, Ragged, is_torch
from .info import Info, NoiseInfo

SOURCE, REPEAT = "source", "source_repeat"


def info_of(infos: Mapping[str, Info]) -> Info:
    """The facts of a batch with rows of all these data sets.

    Raises ``ValueError`` where their vocabularies, special tokens, lengths, sub-tokens or schedules differ.
    """
    (first_name, first), *others = infos.items()
    for name, info in others:
        for field in fields(Info):
            ours, theirs = getattr(first, field.name), getattr(info, field.name)
            if field.name not in ("noise", "sources") and ours != theirs:
                raise ValueError(
                    f"{field.name}: {first_name} has {ours}, {name} has {theirs}; valid in one mixture: equal values"
                )
    return replace(first, noise=_noise_of([info.noise for info in infos.values()]), sources=dict(infos))


def _noise_of(noises: Sequence[NoiseInfo | None]) -> NoiseInfo | None:
    """The facts of the noise of all; None where their seeds differ, because no single seed replays them."""
    known = [noise for noise in noises if noise is not None]
    if len(known) < len(noises) or len({(noise.codec, noise.seed, noise.draws) for noise in known}) != 1:
        return None
    return replace(
        known[0], tolerance=max(n.tolerance for n in known), condition=all(n.condition for n in known)
    )  # fmt: skip


def put_together(parts: Sequence[tuple[npt.NDArray[np.int64], Batch]], rows: int) -> dict[str, Any]:
    """Columns of ``rows`` rows from parts (row numbers in the result, batch). All parts have the same numpy columns."""
    if len(parts) == 1:
        return dict(parts[0][1])
    made: dict[str, Any] = {}
    for name, column in parts[0][1].items():
        columns = [(places, part[name]) for places, part in parts]
        if isinstance(column, Ragged):
            made[name] = _put_together_ragged(columns, rows)
            continue
        made[name] = np.empty((rows, *column.shape[1:]), column.dtype)
        for places, values in columns:
            made[name][places] = values
    return made


def _put_together_ragged(columns: Sequence[tuple[npt.NDArray[np.int64], Ragged]], rows: int) -> Ragged:
    lengths = np.zeros(rows, np.int64)
    for places, column in columns:
        lengths[places] = column.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.empty(offsets[-1], columns[0][1].values.dtype)
    for places, column in columns:
        values[_indices(offsets[places], column.lengths)] = column.values
    return Ragged(values, offsets)


def _indices(begins: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """begin, begin + 1, … for each begin, as many as its length."""
    before = np.concatenate([[0], np.cumsum(lengths)])
    indices: npt.NDArray[np.int64] = np.repeat(begins - before[:-1], lengths) + np.arange(before[-1])
    return indices


def bytes_of(batch: Batch) -> int:
    """Bytes of the columns of a numpy batch."""
    arrays = [
        part
        for column in batch.values()
        for part in ((column.values, column.offsets) if isinstance(column, Ragged) else (column,))
    ]
    return sum(array.nbytes for array in arrays)


def by_source(batch: Batch) -> dict[str, Batch]:
    """Splits a batch by data set: the rows of each in their order, with its own facts.

    Data sets without rows are left out. Raises ``ValueError`` for a batch without a column ``source``. Cost: a copy of
    the batch.
    """
    if batch.info is None or not batch.info.sources or SOURCE not in batch:
        raise ValueError("batch: is not of a mixture; valid: a batch of stillhouse.torch.MixtureDataset, with its info")
    return {name: _part(batch, rows, name) for name, rows in _rows_of_sources(batch).items()}


def _rows_of_sources(batch: Batch) -> dict[str, npt.NDArray[np.int64]]:
    sources = _on_cpu(batch[SOURCE])
    names = () if batch.info is None else batch.info.sources
    found = {name: np.flatnonzero(sources == number) for number, name in enumerate(names)}
    return {name: rows for name, rows in found.items() if len(rows)}


def _part(batch: Batch, rows: npt.NDArray[np.int64], name: str) -> Batch:
    part = batch[rows]
    return Batch(part, None if batch.info is None else batch.info.sources[name], batch.state, part.global_batch)


def _on_cpu(array: Any) -> Any:
    return array.detach().cpu().numpy() if is_torch(array) else array


def _like(array: npt.NDArray[Any], other: Any) -> Any:
    """An array in the library and on the device of another."""
    if not is_torch(other):
        return array
    import torch

    return torch.from_numpy(array).to(other.device)


def keyed_ids(batch: Batch, sequence_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The keys of the random choices of views, [B] uint64: ``sequence_id``, in a mixture with data set and round.

    Data sets of a mixture may have equal sequence ids, and a row that comes twice in an epoch needs a new mask each
    time. Stored ids are (split of the job, row), below 2^48 if the job splits its input into fewer than 65,536 parts.
    Bits 56 to 63 take the number of the data set, bits 48 to 55 take ``source_repeat`` (mod 256). In the first round,
    the keys of the first data set are those that it has alone.
    """
    if SOURCE not in batch or REPEAT not in batch:
        return sequence_ids
    source, repeat = (_on_cpu(batch[name]).astype(np.uint64) for name in (SOURCE, REPEAT))
    high = (source & np.uint64(255)) << np.uint64(8) | repeat & np.uint64(255)
    keyed: npt.NDArray[np.uint64] = sequence_ids ^ high << np.uint64(48)
    return keyed


def has_several_noises(batch: Any) -> bool:
    """Whether the noise of a batch needs the facts of each data set to replay."""
    info = batch.info if isinstance(batch, Batch) else None
    return info is not None and bool(info.sources) and info.noise is None and SOURCE in batch


def replay_by_source(batch: Batch, positions: Any, replay: Callable[[Batch, Any], Any]) -> Any:
    """The noise of each row by the facts of its data set. Cost: a copy of columns and noise."""
    assert batch.info is not None
    found = _rows_of_sources(batch) or {name: np.arange(0) for name in list(batch.info.sources)[:1]}
    if positions is not None and not is_torch(positions):
        positions = np.asarray(positions)
    if positions is not None and (positions.ndim != 2 or len(positions) != batch.rows):
        raise ValueError(
            f"positions has shape {list(positions.shape)}, expected [B, L] or [B, P] with B = {batch.rows}"
        )
    rows_of_output = np.arange(batch.rows)
    if positions is not None and str(positions.dtype).removeprefix("torch.") == "bool":
        rows_of_output = np.nonzero(_on_cpu(positions))[0]
    output: Any = None
    for name, rows in found.items():
        made = replay(_part(batch, rows, name), None if positions is None else positions[_like(rows, positions)])
        if output is None:
            shape = (len(rows_of_output), *made.shape[1:])
            output = made.new_empty(shape) if is_torch(made) else np.empty(shape, made.dtype)
        output[_like(np.flatnonzero(np.isin(rows_of_output, rows)), output)] = made
    return output
