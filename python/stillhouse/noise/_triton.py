"""Replay as one Triton kernel: Philox, exponentials, corrections and output without a trip to memory in between.

    program ─► rows pid, pid + programs, ...          row ─► blocks of BLOCK entries
        block: Philox ─► e ─► corrections of the block ─► E ─► output, or for softmax a weight and its sum
        softmax: a second walk over the row divides by the sum

A row of softmax lies in f32 between the two walks: in the output itself, or for half types in scratch of one row per program.
Logarithms are the polynomial of the Rust core (Cephes' ``logf``): ``tl.log`` may be the hardware's approximate one, which
does not keep 4 ulp. Corrections must ascend by index: those of a block are then the next ones of the row.
"""

# A kernel's types are Triton's, which says none.
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ._torch import _DRAW, Tokens, value_of

_SOFTMAX, _GUMBEL, _GAUSSIAN, _UNIFORM = 0, 1, 2, 3
_KINDS = {"softmax": _SOFTMAX, "gumbel": _GUMBEL, "gaussian": _GAUSSIAN, "uniform": _UNIFORM}
_QUADS = 512  # counters of a block: 2,048 entries
_WARPS = 8
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _ln_1p_reduced(f, n):  # type: ignore[no-untyped-def]
    z = f * f
    p = 7.0376836e-2
    p = p * f - 1.151461e-1
    p = p * f + 1.1676999e-1
    p = p * f - 1.2420141e-1
    p = p * f + 1.4249323e-1
    p = p * f - 1.6668058e-1
    p = p * f + 2.0000715e-1
    p = p * f - 2.4999994e-1
    p = p * f + 3.333333e-1
    tail = (p * f * z + n * -2.1219444e-4) - 0.5 * z
    return (f + tail) + n * 0.6933594


@triton.jit
def _reduced(y):  # type: ignore[no-untyped-def]
    """A positive normal y as (f, n) with y = (1 + f)·2^n, 1 + f in [√½, √2)."""
    bits = y.to(tl.int32, bitcast=True)
    n = (bits - 0x3F3504F3) >> 23
    m = (bits - (n << 23)).to(tl.float32, bitcast=True)
    return m - 1.0, n.to(tl.float32)


@triton.jit
def _ln(y):  # type: ignore[no-untyped-def]
    f, n = _reduced(y)
    return _ln_1p_reduced(f, n)


@triton.jit
def _exponential(word):  # type: ignore[no-untyped-def]
    from_word = (word.to(tl.float32) + 0.5) * -2.3283064365386963e-10
    f, n = _reduced((~word).to(tl.float32) + 0.5)
    near_one = word < 1257966796
    return -_ln_1p_reduced(tl.where(near_one, from_word, f), tl.where(near_one, 0.0, n - 32.0))


@triton.jit
def _normal(e):  # type: ignore[no-untyped-def]
    """Φ⁻¹(exp(−E)); the fit of quantile.rs."""
    e = tl.minimum(e, 48.0)
    upper = e < 0.6931471805599453
    p = 1.9875691e-4
    p = p * -e + 1.3981999e-3
    p = p * -e + 8.333452e-3
    p = p * -e + 4.1665796e-2
    p = p * -e + 1.6666665e-1
    p = p * -e + 0.5
    u = tl.exp(-e)
    t = tl.where(upper, tl.where(e < 0.34, e - p * e * e, 1.0 - u), u)
    w = -_ln(4.0 * t * (1.0 - t))
    c = w - 2.5
    a = 4.0621664e-8
    a = a * c + 4.8656943e-7
    a = a * c - 4.9932587e-6
    a = a * c - 6.2223035e-6
    a = a * c + 3.091582e-4
    a = a * c - 1.772999e-3
    a = a * c - 5.9081777e-3
    a = a * c + 3.4880266e-1
    a = a * c + 2.1233137
    s = tl.sqrt(tl.maximum(w, 0.0)) - 4.5
    b = 2.9383924e-7
    b = b * s - 2.4720876e-7
    b = b * s - 5.9819636e-6
    b = b * s + 1.9757792e-5
    b = b * s - 4.7887312e-5
    b = b * s + 1.9473447e-4
    b = b * s - 6.187989e-4
    b = b * s + 4.7261e-4
    b = b * s + 1.4286891
    b = b * s + 6.1444087
    z = tl.where(w < 5.0, a * (1.0 - 2.0 * t), b)
    return tl.where(upper, z, -z)


@triton.jit(do_not_specialize=["n", "temperature"])  # type: ignore[untyped-decorator]
def _replay(  # type: ignore[no-untyped-def]
    out, scratch, key, low, high, position, token, value, starts, index, added, n, vocab, temperature,
    KIND: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = 4 * QUADS
    FAR: tl.constexpr = 2147483647
    seed = tl.load(key)
    pid = tl.program_id(0)
    for row in range(pid, n, tl.num_programs(0)):
        zero = tl.zeros([QUADS], tl.int32)
        c1, c2, c3 = zero + tl.load(position + row), zero + tl.load(low + row), zero + tl.load(high + row)
        x, at_x = tl.load(token + row), tl.load(value + row)
        correction, end = tl.load(starts + row), tl.load(starts + row + 1)
        next_index = tl.load(index + correction, mask=correction < end, other=FAR)
        out_row = out + tl.cast(row, tl.int64) * vocab
        # Between the walks of softmax the row lies here.
        if HALF:
            held = scratch + tl.cast(pid, tl.int64) * vocab
        else:
            held = out_row
        # exp(ξ_x) may overflow: all weights are divided by it where it is above 1. (ξ_x is −∞ where there is no x.)
        shift = tl.maximum(at_x, 0.0)
        total = tl.zeros([BLOCK], tl.float32)
        largest = tl.full([BLOCK], -1e30, tl.float32)
        for first in range(0, vocab, BLOCK):
            c0 = zero + first // 4 + tl.arange(0, QUADS)
            r0, r1, r2, r3 = tl.philox(seed, c0, c1, c2, c3)
            words = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
            entry = first + tl.arange(0, BLOCK)
            inside = entry < vocab
            e = _exponential(words)
            while next_index < first + BLOCK:
                e = tl.where(entry == next_index, e + tl.load(added + correction), e)
                correction += 1
                next_index = tl.load(index + correction, mask=correction < end, other=FAR)
            if KIND == 0:
                weighed = inside & (entry != x)
                if UNIT:
                    weight = tl.where(weighed, tl.exp(-shift) / e, 0.0)
                    total += weight
                else:
                    weight = tl.where(weighed, -temperature * _ln(e), -1e30)
                    above = tl.maximum(largest, weight)
                    total = total * tl.exp(largest - above) + tl.where(weighed, tl.exp(weight - above), 0.0)
                    largest = above
                tl.store(held + entry, weight, mask=inside)
            else:
                if KIND == 1:
                    result = -temperature * _ln(e)
                elif KIND == 2:
                    result = temperature * _normal(e)
                else:
                    result = tl.exp(-e)
                tl.store(out_row + entry, tl.where(entry == x, at_x, result), mask=inside)
        if KIND == 0:
            if UNIT:
                at_token = tl.exp(at_x - shift)
                factor = 1.0 / (tl.sum(total, 0) + at_token)
            else:
                shift = tl.maximum(tl.max(largest, 0), at_x)
                at_token = tl.exp(at_x - shift)
                factor = 1.0 / (tl.sum(total * tl.exp(largest - shift), 0) + at_token)
            tl.debug_barrier()  # what one thread of the program stored another may load
            for first in range(0, vocab, BLOCK):
                entry = first + tl.arange(0, BLOCK)
                inside = entry < vocab
                weight = tl.load(held + entry, mask=inside, other=0.0)
                if not UNIT:
                    weight = tl.exp(weight - shift)
                tl.store(out_row + entry, tl.where(entry == x, at_token, weight) * factor, mask=inside)
            tl.debug_barrier()  # the scratch is free for the next row only now


def _programs(device: torch.device, n: int) -> int:
    if device.type != "cuda":
        return min(n, 4)
    return min(n, _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)


def replay(tokens: Tokens, vocab: int, seed: int, draw: int, out: str, temperature: float, array: torch.Tensor) -> None:
    """Writes the noise of the asked tokens into ``array`` [n, V]."""
    n, device = len(tokens), array.device
    if n == 0:
        return
    s = (seed + draw * _DRAW) % 2**64
    key = torch.tensor([s - 2**64 if s >= 2**63 else s], dtype=torch.int64, device=device)
    low, high, position = (words.to(torch.int32) for words in (tokens.low, tokens.high, tokens.position))  # their bits
    if tokens.token is None or tokens.xi is None:  # prior noise: no entry stands apart
        token = torch.full((n,), -1, dtype=torch.int32, device=device)
        value = torch.full((n,), -math.inf, device=device)
    else:
        token = tokens.token.to(torch.int32)
        value = value_of(out, tokens.xi, temperature).to(torch.float32)
        if array.dtype == torch.float16 and out != "softmax":
            value = value.clamp(max=torch.finfo(array.dtype).max)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    starts = torch.zeros(n + 1, dtype=torch.int64, device=device) if tokens.starts is None else tokens.starts
    some = tokens.index is not None and len(tokens.index) > 0
    index = tokens.index.to(torch.int32) if tokens.index is not None and some else none
    added = tokens.added if tokens.added is not None and some else none.to(torch.float32)
    programs = _programs(device, n)
    held = out == "softmax" and array.dtype != torch.float32
    scratch: Any = torch.empty((programs, vocab), dtype=torch.float32, device=device) if held else array
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _replay[(programs,)](
            array, scratch, key, low, high, position, token, value,
            starts, index, added, n, vocab, float(temperature),
            KIND=_KINDS[out], UNIT=temperature == 1.0, HALF=held, QUADS=_QUADS, num_warps=_WARPS,
        )  # fmt: skip
