"""Replay on the CPU: numpy arrays, or CPU tensors seen as numpy arrays, handed to the Rust core without a copy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..batch import is_torch
from ._columns import Stored

_RUST_INTEGERS = {"uint8", "uint16", "uint32", "int32", "int64"}


def _numpy(array: Any) -> NDArray[Any]:
    contiguous: NDArray[Any] = np.ascontiguousarray(array.detach().numpy() if is_torch(array) else array)
    return contiguous


def _integers(array: Any) -> NDArray[Any]:
    numbers = _numpy(array)
    return numbers if numbers.dtype.name in _RUST_INTEGERS else numbers.astype(np.int64)


def _reals(array: Any) -> NDArray[Any]:
    if is_torch(array) and str(array.dtype) == "torch.bfloat16":
        array = array.float()
    numbers = _numpy(array)
    return numbers.view(np.uint16) if numbers.dtype == np.float16 else numbers.astype(np.float32, copy=False)


def _tokens(array: Any) -> NDArray[Any]:
    ids = _numpy(array)
    # An id beyond 32 bits must not come back as a valid one; clipped it is outside of the vocabulary still.
    return ids if ids.dtype == np.int32 else np.clip(ids, -1, 2**31 - 1).astype(np.int32)


def _bits(sequence_id: Any) -> NDArray[Any]:
    return _numpy(sequence_id).view(np.uint64)


def default_threads() -> int:
    """1 in a worker of a ``DataLoader``, which has others beside it; else 0, all cores this process may use."""
    data = sys.modules.get("torch.utils.data")
    return 1 if data is not None and data.get_worker_info() is not None else 0


def request(
    out: str, temperature: float, element: str, threads: int | None, vocab: int, seed: int, draw: int
) -> dict[str, Any]:
    """What the core is asked for."""
    return {
        "kind": out,
        "temperature": temperature,
        "element": element,
        "threads": default_threads() if threads is None else threads,
        "vocab": vocab,
        "seed": seed,
        "draw": draw,
    }


def _writable(array: Any) -> NDArray[Any]:
    """The output as the core takes it: f32, or the bits of a half type."""
    if is_torch(array):
        import torch

        array = array.numpy() if array.dtype == torch.float32 else array.view(torch.int16).numpy()
    seen: NDArray[Any] = array if array.dtype == np.float32 else array.view(np.uint16)
    return seen


def replay(stored: Stored, tokens: Any, asked_for: dict[str, Any], array: Any) -> None:
    """Writes the noise of the asked tokens into ``array`` [n, V], of numpy or torch."""
    shape = (stored.rows, stored.draws, stored.length)
    numbers = None if tokens is None else _numpy(tokens)
    if stored.noise is not None:
        _core.replay_dense(_reals(stored.noise), shape, numbers, asked_for, _writable(array))
        return
    columns = {
        "sequence_id": _bits(stored.sequence_id),
        "input_ids": _tokens(stored.input_ids),
        "logprob": _numpy(stored.logprob).astype(np.float32, copy=False),
        "noise_count": _integers(stored.count),
        "offsets": _integers(stored.offsets).astype(np.int64, copy=False),
        "noise_index": _integers(stored.index),
        "noise_logprob": _reals(stored.values),
    }
    _core.replay(columns, shape, numbers, asked_for, _writable(array))


def prior(sequence_id: Any, positions: Any, asked_for: dict[str, Any], array: Any) -> None:
    """Writes prior noise of n (sequence, position) pairs into ``array`` [n, V]."""
    _core.prior(_bits(sequence_id), _numpy(positions), asked_for, _writable(array))
