"""Replays the posterior Gumbel noise of a data set: what a student of Gumbel distillation is conditioned on.

For a token x that was observed where the teacher's distribution was p (Gumbel distillation, Algorithm 1 and Eq. 4)::

    E_k = e_k + p_k·e_0  (k ≠ x)      E_x = p_x·e_0      ξ = −ln E      softmax(ξ)_k = (1/E_k) / Σ_j 1/E_j

The e are Exp(1) variates that Philox4x32-10 replays from (noise seed, draw, sequence id, position). The batch holds ln p_x
and those few p_k that the tolerance requires::

    batch = next(iter(loader))                                    # of stillhouse.open(...) or stillhouse.torch
    masked = batch["partition"][:, 0]                             # bool [B, L]
    blueprint = stillhouse.noise.replay(batch, masked)            # f32 [n, V], rows sum to 1

At inference the noise is drawn from the prior, and scaled, as in the paper's appendix C.1::

    blueprint = stillhouse.noise.prior(seed, sequence_id, positions, vocab_size, temperature=0.85)

On a CPU the Rust core does it (AVX-512 or AVX2, all cores); on a CUDA device a Triton kernel, or torch operations where Triton
is not installed; on other devices torch operations. All agree within the tolerance of f32 (see :func:`replay`).
"""

from __future__ import annotations

import importlib.util
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ..batch import ArrayT, Batch, is_torch
from ..errors import StillhouseError
from ..info import Info
from ..mixed import has_several_noises, replay_by_source
from . import _columns, _rust

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ..views.example import NoiseOptions

__all__ = ["prior", "replay"]

Kind = Literal["softmax", "gumbel", "gaussian", "uniform"]
Backend = Literal["rust", "torch", "triton"]

_KINDS = ("softmax", "gumbel", "gaussian", "uniform")
_BACKENDS = ("rust", "torch", "triton")
_DTYPES = {"numpy": ("float32", "float16"), "torch": ("float32", "float16", "bfloat16")}


class _Target:
    """Where the output goes, in which type, and who makes it."""

    def __init__(self, torch_in: bool, device_in: Any, dtype: Any, device: Any, backend: str | None) -> None:
        self.torch = torch_in or device is not None
        library = "torch" if self.torch else "numpy"
        name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
        if dtype is not None and not isinstance(dtype, str) and not is_torch(dtype):
            name = np.dtype(dtype).name
        if name not in _DTYPES[library]:
            raise ValueError(
                f"dtype is {dtype!r}, expected one of {', '.join(_DTYPES[library])} for a {library} output"
            )
        self.dtype = name
        self.device: Any = None
        if self.torch:
            import torch

            self.device = torch.device(device if device is not None else device_in)
            if self.device.type == "cuda" and self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
        self.backend = self._choose(backend)

    def _choose(self, backend: str | None) -> str:
        kind = "cpu" if self.device is None else self.device.type
        if backend is None:
            if kind == "cpu":
                return "rust"
            return "triton" if kind == "cuda" and importlib.util.find_spec("triton") else "torch"
        if backend not in _BACKENDS:
            raise ValueError(f"backend is {backend!r}, expected one of {', '.join(_BACKENDS)} or None")
        if backend == "rust" and kind != "cpu":
            raise ValueError(f"backend 'rust' makes noise on the CPU, not on {self.device}")
        if backend == "triton":
            if importlib.util.find_spec("triton") is None:
                raise StillhouseError("backend 'triton' needs the package triton")
            if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
                raise ValueError(f"backend 'triton' needs a CUDA device, not {self.device or 'cpu'}")
        return backend

    def empty(self, n: int, vocab: int) -> Any:
        if not self.torch and self.backend == "rust":
            return np.empty((n, vocab), self.dtype)
        import torch

        dtype = getattr(torch, self.dtype)
        if self.backend == "rust" and n * vocab:
            # numpy asks the kernel for huge pages, torch does not: page by page, faults cost twice what the noise does.
            memory = np.empty((n, vocab * dtype.itemsize), np.uint8)
            return torch.from_numpy(memory).view(dtype)
        return torch.empty((n, vocab), dtype=dtype, device=self.device)

    def bring(self, array: Any, move: bool = True) -> Any:
        """An input where the backend takes it: the Rust core takes numpy and CPU tensors, the others tensors."""
        if array is None or (self.backend == "rust" and not is_torch(array)):
            return array
        import torch

        if not is_torch(array):
            if array.dtype == np.uint64:
                array = array.view(np.int64)
            elif array.dtype.name in ("uint16", "uint32"):
                array = array.astype(np.int64)
            array = torch.from_numpy(np.array(array) if not array.flags.writeable else np.ascontiguousarray(array))
        return array.to("cpu" if self.device is None else self.device) if move else array

    def finish(self, array: Any, shape: tuple[int, ...]) -> Any:
        """The output in its final shape and library."""
        array = array.reshape(shape)
        return array if self.torch or not is_torch(array) else array.numpy()


def _check(out: str, temperature: float, threads: int | None) -> float:
    if out not in _KINDS:
        raise ValueError(f"out is {out!r}, expected one of {', '.join(_KINDS)}")
    temperature = float(temperature)
    if not (math.isfinite(temperature) and 1e-37 < temperature < 1e37):
        raise ValueError(f"temperature is {temperature}, expected a finite number above 0")
    if out == "uniform" and temperature != 1.0:
        raise ValueError(f"temperature is {temperature}, but uniform noise has no scale: only 1 is valid")
    if threads is not None and (isinstance(threads, bool) or threads < 1):
        raise ValueError(f"threads is {threads}, expected at least 1 (or None: all cores this process may use)")
    return temperature


@overload
def replay(
    batch: Batch[ArrayT], positions: Any = None, *, device: None = None, **options: Unpack[NoiseOptions]
) -> ArrayT: ...
@overload
def replay(
    batch: Batch[ArrayT], positions: Any = None, *, device: str | torch.device, **options: Unpack[NoiseOptions]
) -> torch.Tensor: ...
@overload
def replay(
    batch: Mapping[str, Any],
    positions: Any = None,
    draw: int = 0,
    out: Kind = "softmax",
    temperature: float = 1.0,
    *,
    info: Info | None = None,
    dtype: Any = None,
    device: str | torch.device | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
) -> Any: ...
def replay(
    batch: Mapping[str, Any],
    positions: Any = None,
    draw: int = 0,
    out: Kind = "softmax",
    temperature: float = 1.0,
    *,
    info: Info | None = None,
    dtype: Any = None,
    device: str | torch.device | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
) -> Any:
    """The noise of the tokens of a batch, or of those asked for: ``[n, V]`` and similar, see ``positions``.

    Args:
        batch: a :class:`stillhouse.Batch`, or a mapping of columns together with ``info``; arrays all of numpy or all of torch.
            Columns, codec ``replay``: ``sequence_id`` [B], ``input_ids`` [B, L], ``logprob`` [B, L] (ln p_x),
            ``noise_count`` [B, D, L], ``noise_index`` and ``noise_logprob`` ragged; codec ``dense``: ``noise`` [B, D, L, V]. Of text that the teacher wrote
            (``prior``): ``sequence_id`` and ``input_ids``; its noise is that of :func:`prior`, at every position.
            With one draw the axis D may be missing. Positions that are given or padding get prior noise.
        positions: which tokens. None: all, output [B, L, V]. bool [B, L]: the true ones in row-major order, output [n, V].
            Integers [B, P], each 0 to L−1: output [B, P, V].
        draw: which of the D independent noises.
        out: ``"softmax"``: softmax(τ·ξ) over the vocabulary (the student's input: section 4.2, Eq. 10). ``"gumbel"``: τ·ξ.
            ``"gaussian"``: τ·Φ⁻¹(exp(−exp(−ξ))), standard normal at τ = 1. ``"uniform"``: exp(−exp(−ξ)) (both: Table 5).
        temperature: τ > 0. The paper trains at 1 and infers at 0.85. Uniform noise takes 1 only.
        info: facts of the data set, if the batch has none.
        dtype: of the output, a type or its name: float32 (the default), float16, for torch also bfloat16.
        device: of the output, which is then of torch; the few columns needed are moved there first. None: the batch's own,
            numpy for numpy.
        threads: of the Rust core. None: all cores this process may use, one in a worker of a ``DataLoader``.
        backend: ``"rust"``, ``"torch"`` or ``"triton"`` to force one.

    Returns:
        A new array. All values are finite (τ up to 2,000). ξ_k for k ≠ x lies in −4 to 22.9; ξ_x = −ln p_x − ln e_0 has no upper bound, and is
        rounded to the largest finite number where a half type cannot hold it. Uniforms round to 1 above ξ = 17 (f32), 8 (f16)
        and 6 (bf16), where a Gaussian still distinguishes values. Of a softmax over a large vocabulary most values are below
        6·10⁻⁵, where f16 loses digits and then everything (below 3·10⁻⁸): bfloat16 keeps them. In f32, what is below 10⁻²⁶ of the
        largest may be 0.

        Backends agree within 4·10⁻⁶ (Gumbel, Gaussian, relative to max(1, ·)), 10⁻⁶ (uniform), and a relative 2·10⁻⁵·max(1, τ)
        for softmax. The Rust core gives the same bits for every number of threads and CPU.

    Raises:
        ColumnError: a column is missing, has the wrong type or shape, or has values that no data set contains.
        StillhouseError: the batch has no ``info``, or the data set no noise.
        ValueError: an argument is out of range.

    Memory beyond the output: 4·V bytes per thread (Rust), one row per running program (Triton), 150 MB (torch).
    """
    if info is None and has_several_noises(batch):
        options: Any = {"dtype": dtype, "device": device, "threads": threads, "backend": backend}
        return replay_by_source(batch, positions, lambda b, at: replay(b, at, draw, out, temperature, **options))  # type: ignore[arg-type]
    temperature = _check(out, temperature, threads)
    stored = _columns.stored(batch, info, draw)
    source = stored.input_ids if stored.noise is None else stored.noise
    torch_in = is_torch(source)
    target = _Target(torch_in, source.device if torch_in else None, dtype, device, backend)
    tokens, shape = _columns.asked(positions, stored.rows, stored.length)
    n = stored.rows * stored.length if tokens is None else len(tokens)
    array = target.empty(n, stored.vocab)
    if stored.noise is not None and target.backend != "rust":
        # Nothing is replayed: torch does it on every device, and only the asked tokens go there.
        from . import _torch

        noise = target.bring(stored.noise, move=False)
        tokens = None if tokens is None else target.bring(tokens).to(noise.device)
        _torch.replay_dense(replace(stored, noise=noise), tokens, out, temperature, array)
        return target.finish(array, (*shape, stored.vocab))
    if stored.noise is None and stored.logprob is None:
        ids, at = _columns.of_written(stored, tokens)
        _make_prior(target, ids, at, (stored.vocab, stored.seed, stored.draw), out, temperature, threads, array)
        return target.finish(array, (*shape, stored.vocab))
    stored, tokens = stored.map(target.bring), target.bring(tokens)
    if target.backend == "rust":
        asked = _rust.request(out, temperature, target.dtype, threads, stored.vocab, stored.seed, stored.draw)
        _rust.replay(stored, tokens, asked, array)
    else:
        from . import _torch

        found = _torch.look_up(stored, tokens)
        _make(target.backend)(found, stored.vocab, stored.seed, stored.draw, out, temperature, array)
    return target.finish(array, (*shape, stored.vocab))


def prior(
    seed: int,
    sequence_id: Any,
    positions: Any,
    vocab_size: int,
    *,
    draw: int = 0,
    out: Kind = "softmax",
    temperature: float = 1.0,
    dtype: Any = None,
    device: str | torch.device | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
) -> Any:
    """Prior noise ξ_k = −ln e_k, without an observed token: for inference, and for text that the teacher wrote.

    Args:
        seed: any u64. The data set's ``info.noise.seed`` and the ids of its rows give the noise that the teacher's text was
            sampled with; for generation, use another seed.
        sequence_id: an integer, or [B]: which stream. Equal (seed, draw, id, position) give equal noise.
        positions: an integer, [P], or [B, P], from 0.
        vocab_size: V.

    Other arguments and the result are those of :func:`replay`. The output is numpy unless an argument is a tensor or
    ``device`` is given.

    Returns:
        [P, V] where ``sequence_id`` is an integer and ``positions`` is [P] ([V] where it is an integer too), else [B, P, V]
        ([B, V] for one integer position).
    """
    temperature = _check(out, temperature, threads)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}, expected 0 to 2^64 − 1")
    if not 0 <= draw < 2**32:
        raise ValueError(f"draw is {draw}, expected 0 to 2^32 − 1")
    if not 1 <= vocab_size <= 2**31:
        raise ValueError(f"vocab_size is {vocab_size}, expected 1 to 2^31")
    given = [value for value in (sequence_id, positions) if is_torch(value)]
    target = _Target(bool(given), given[0].device if given else None, dtype, device, backend)
    if isinstance(sequence_id, (list, tuple)):  # numpy would make floats of a list with ids on both sides of 2^63
        sequence_id = np.array([operator.index(i) % 2**64 for i in sequence_id], np.uint64)
    ids = sequence_id.detach().cpu().numpy() if is_torch(sequence_id) else np.asarray(sequence_id)
    at = positions.detach().cpu().numpy() if is_torch(positions) else np.asarray(positions)
    if ids.dtype.kind not in "iu" or ids.ndim > 1:
        raise ValueError(f"sequence_id is {ids.dtype} of shape {list(ids.shape)}, expected an integer or integers [B]")
    if at.dtype.kind not in "iu" or at.ndim > 2 or (at.ndim == 2 and len(at) != ids.size):
        raise ValueError(f"positions is {at.dtype} of shape {list(at.shape)}, expected an integer, [P] or [B, P]")
    if ((at < 0) | (at > 2**32 - 1)).any():
        raise ValueError("a position is out of range (0 to 2^32 − 1)")
    shape = ids.shape + (at.shape[1:] if at.ndim == 2 and ids.ndim == 1 else at.shape)
    table = at.reshape(-1, at.shape[-1]) if at.ndim == 2 else at.reshape(1, -1)
    grid = np.broadcast_to(table.astype(np.int64), (ids.size, table.shape[1]))
    flat_ids = np.repeat(ids.reshape(-1).astype(np.uint64), grid.shape[1])
    flat_at = np.ascontiguousarray(grid).reshape(-1)
    array = target.empty(len(flat_at), vocab_size)
    _make_prior(target, flat_ids, flat_at, (vocab_size, seed, draw), out, temperature, threads, array)
    return target.finish(array, (*shape, vocab_size))


def _make_prior(
    target: _Target,
    ids: Any,
    at: Any,
    of: tuple[int, int, int],
    out: str,
    temperature: float,
    threads: int | None,
    array: Any,
) -> None:
    """Prior noise of n (sequence, position) pairs, of (V, seed, draw), into ``array`` [n, V]."""
    vocab, seed, draw = of
    if target.backend == "rust":
        asked = _rust.request(out, temperature, target.dtype, threads, vocab, seed, draw)
        _rust.prior(ids, at, asked, array)
        return
    from . import _torch

    low, high = _torch.split(target.bring(ids))
    tokens = _torch.Tokens(low, high, target.bring(at))
    _make(target.backend)(tokens, vocab, seed, draw, out, temperature, array)


def _make(backend: str) -> Any:
    """The function that replays looked-up tokens."""
    if backend == "triton":
        from . import _triton

        return _triton.replay
    from . import _torch

    return _torch.replay
