"""Replay with torch operations, on any device, and the look-up of the asked tokens that the Triton kernel shares.

    counters ─► Philox4x32-10 in int64 ─► e = −log1p(−v) or −log(1 − v) ─► E = e, corrections added ─► output

A word lives in the low half of an int64: one multiplication gives both halves of the product. The output is made in chunks
of about 2^21 values, so the scratch stays near 150 MB whatever is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import ColumnError
from ._columns import Stored

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_DRAW = 0x9E3779B97F4A7C15
_TOP = 1_257_966_796  # floor((1 − √½)·2^32): above, 1 − v is taken from the complement of the word
_CHUNK = 1 << 21  # values


def philox(counter: tuple[torch.Tensor, ...], seed: int, draw: int) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of broadcastable int64 counter words below 2^32."""
    s = (seed + draw * _DRAW) % 2**64
    k0, k1 = s & _MASK, s >> 32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # the product of two words overflows int64 to the right bits
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def exponential(word: torch.Tensor) -> torch.Tensor:
    """The Exp(1) variate of random words, f32 within 4 ulp, small ones with full relative precision."""
    near_one = torch.log1p((word.to(torch.float32) + 0.5) * -(2.0**-32))
    far = torch.log(((_MASK - word).to(torch.float32) + 0.5) * 2.0**-32)
    return torch.where(word < _TOP, near_one, far).neg_()


@dataclass(frozen=True)
class Tokens:
    """The asked tokens. Corrections of token i are ``starts[i] : starts[i + 1]`` of ``index`` and ``added``, ascending."""

    low: torch.Tensor  # [n] int64, sequence_id mod 2^32
    high: torch.Tensor  # [n] int64, sequence_id div 2^32
    position: torch.Tensor  # [n] int64
    token: torch.Tensor | None = None  # [n] int64, x; None for prior noise
    xi: torch.Tensor | None = None  # [n] f64, ξ_x
    starts: torch.Tensor | None = None  # [n + 1] int64
    owner: torch.Tensor | None = None  # [m] int64, the token a correction belongs to
    index: torch.Tensor | None = None  # [m] int64, k
    added: torch.Tensor | None = None  # [m] f32, exp(v)·e_0

    def __len__(self) -> int:
        return len(self.position)


def double(device: torch.device) -> torch.dtype:
    """The widest float of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def split(sequence_id: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high word of ids whose bits are in int64."""
    bits = sequence_id.view(torch.int64)
    return bits & _MASK, (bits >> 32) & _MASK


def look_up(stored: Stored, tokens: torch.Tensor | None) -> Tokens:
    """Gathers what the asked tokens need and checks it, with two waits for the device."""
    device = stored.input_ids.device
    rows, length, vocab = stored.rows, stored.length, stored.vocab
    if tokens is None:
        tokens = torch.arange(rows * length, device=device)
    outside = ((tokens < 0) | (tokens >= rows * length)).any()
    tokens = tokens.clamp(0, max(rows * length - 1, 0))
    row, position = tokens // max(length, 1), tokens % max(length, 1)
    counts = stored.count.to(torch.int64)
    offsets = stored.offsets.to(torch.int64)
    differ = (counts.sum((1, 2)) != offsets[1:] - offsets[:-1]).any() | (counts < 0).any()
    differ |= (offsets[0] < 0) | (offsets[-1] > len(stored.index))
    flat = counts.reshape(rows, stored.draws * length)
    begin = (flat.cumsum(1) - flat + offsets[:-1, None]).view(rows, stored.draws, length)[row, stored.draw, position]
    count = counts[row, stored.draw, position]
    starts = torch.cat([count.new_zeros(1), count.cumsum(0)])
    wrong_position, wrong_count, total = torch.stack([outside.long(), differ.long(), starts[-1]]).tolist()
    if wrong_position:
        raise ValueError(f"a position is out of range (0 to {length - 1})")
    if wrong_count:
        raise ColumnError(
            "noise_count does not add up to the corrections that noise_index and noise_logprob hold; "
            "the columns must come from the same rows"
        )

    wide = double(device)
    low, high = split(stored.sequence_id)
    low, high = low[row], high[row]
    token = stored.input_ids.reshape(-1)[tokens].to(torch.int64)
    logprob = stored.logprob.reshape(-1)[tokens].to(wide)
    auxiliary = philox((torch.full_like(low, _MASK), position, low, high), stored.seed, stored.draw)[0]
    e0 = exponential(auxiliary)
    owner = torch.repeat_interleave(torch.arange(len(tokens), device=device), count, output_size=total)
    at = torch.arange(total, device=device) + (begin - starts[:-1])[owner]
    index = stored.index[at].to(torch.int64)
    values = stored.values[at].to(wide)
    added = (values.exp() * e0[owner].to(wide)).to(torch.float32)
    unordered = ((index[1:] < index[:-1]) & (owner[1:] == owner[:-1])).any()
    checks = {
        "a token of input_ids": ((token < 0) | (token >= vocab)).any(),
        "a token of noise_index": ((index < 0) | (index >= vocab)).any(),
        "a value of noise_logprob": ~values.isfinite().all(),
        "a value of logprob": ~logprob.isfinite().all(),
        "the order of noise_index": unordered,
    }
    wrong = torch.stack(list(checks.values())).tolist()
    if any(wrong):
        names = ", ".join(name for name, bad in zip(checks, wrong) if bad)
        raise ColumnError(
            f"not valid: {names} (tokens are below {vocab}, values finite, corrections ascend by token); "
            "the columns are damaged, or `info` is of another data set"
        )
    return Tokens(low, high, position, token, -logprob - e0.to(wide).log(), starts, owner, index, added)


def _upper_quantile(tail: torch.Tensor) -> torch.Tensor:
    """z with −ln(1 − Φ(z)) = ``tail``, for tails above 40: Newton's method, with Mills' ratio by its continued fraction."""
    z = torch.sqrt(2 * tail)
    for _ in range(6):
        inverse = z
        for n in range(30, 0, -1):
            inverse = z + n / inverse
        z = z - (z * z / 2 + 0.5 * math.log(2 * math.pi) + torch.log(inverse) - tail) / inverse
    return z


def _normal_of_total(e: torch.Tensor) -> torch.Tensor:
    """Φ⁻¹(exp(−E)), both tails in full precision, for E from 1e-37 on."""
    lower = e >= math.log(2)
    near = torch.special.ndtri(torch.where(lower, torch.exp(-e), -torch.expm1(-e)))
    return torch.where(lower, near, -near)


def normal_of_gumbel(xi: torch.Tensor) -> torch.Tensor:
    """Φ⁻¹(exp(−exp(−ξ))) in the type of ``xi``, finite for any finite ξ."""
    z = _normal_of_total(torch.exp(-xi.clamp(max=40.0)))
    far = xi > 40.0
    if bool(far.any()):  # there −ln(1 − u) = ξ to the last bit
        z[far] = _upper_quantile(xi[far])
    return z


def value_of(out: str, xi: torch.Tensor, temperature: float) -> torch.Tensor:
    """The output at the observed tokens, from their ξ; for softmax τ·ξ."""
    if out == "uniform":
        return torch.exp(-torch.exp(-xi))
    return temperature * (normal_of_gumbel(xi) if out == "gaussian" else xi)


def _totals(chunk: slice, tokens: Tokens, ends: list[int], vocab: int, seed: int, draw: int) -> torch.Tensor:
    """E [c, V] f32 of a chunk of tokens (of the observed ones, e)."""
    words = [words[chunk, None] for words in (tokens.position, tokens.low, tokens.high)]
    block = torch.arange((vocab + 3) // 4, device=tokens.position.device)[None]
    quads = torch.stack(philox((block, words[0], words[1], words[2]), seed, draw), -1)
    e = exponential(quads.reshape(len(words[0]), -1)[:, :vocab])
    if tokens.owner is not None and tokens.index is not None and tokens.added is not None:
        part = slice(ends[0], ends[1])
        # Values of one entry add up.
        e.index_put_((tokens.owner[part] - chunk.start, tokens.index[part]), tokens.added[part], accumulate=True)
    return e


def _of_totals(e: torch.Tensor, tokens: Tokens, chunk: slice, out: str, temperature: float) -> torch.Tensor:
    token = None if tokens.token is None else tokens.token[chunk]
    xi = None if tokens.xi is None else tokens.xi[chunk]
    rows = torch.arange(len(e), device=e.device)
    if out == "softmax" and temperature == 1.0:
        # exp(ξ_x) may overflow: everything is divided by it where it is above 1.
        shift = e.new_zeros(len(e), dtype=torch.float32) if xi is None else xi.clamp(min=0)
        weight = torch.exp(-shift).to(torch.float32)[:, None] / e
        if xi is not None:
            weight[rows, token] = torch.exp(xi - shift).to(torch.float32)
        return weight.div_(weight.sum(1, keepdim=True))
    if out in ("softmax", "gumbel"):
        result = e.log_().mul_(-temperature)
    elif out == "uniform":
        result = e.neg_().exp_()
    else:
        result = _normal_of_total(e).mul_(temperature)
    if xi is not None:
        result[rows, token] = value_of(out, xi, temperature).to(torch.float32)
    return result.softmax(1) if out == "softmax" else result


def write(array: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Rounds into the output; the one value without a bound becomes the largest finite one."""
    largest = torch.finfo(array.dtype).max
    if array.dtype == torch.float16:
        values = values.clamp(max=largest)
    array[start : start + len(values)].copy_(values)


def replay(tokens: Tokens, vocab: int, seed: int, draw: int, out: str, temperature: float, array: torch.Tensor) -> None:
    """Writes the noise of the asked tokens into ``array`` [n, V]."""
    step = max(1, _CHUNK // vocab)
    starts = list(range(0, len(tokens), step))
    ends = [0] * (len(starts) + 1)
    if tokens.starts is not None:
        ends = tokens.starts[torch.tensor([*starts, len(tokens)], device=tokens.starts.device)].tolist()
    for i, start in enumerate(starts):
        chunk = slice(start, start + step)
        e = _totals(chunk, tokens, ends[i : i + 2], vocab, seed, draw)
        write(array, start, _of_totals(e, tokens, chunk, out, temperature))


def replay_dense(
    stored: Stored, tokens: torch.Tensor | None, out: str, temperature: float, array: torch.Tensor
) -> None:
    """Writes stored dense noise of the asked tokens into ``array`` [n, V], on another device than the noise if need be."""
    noise, rows, length = stored.noise[:, stored.draw], stored.rows, stored.length
    if tokens is None:
        tokens = torch.arange(rows * length, device=noise.device)
    elif bool(((tokens < 0) | (tokens >= rows * length)).any()):
        raise ValueError(f"a position is out of range (0 to {length - 1})")
    step = max(1, _CHUNK // stored.vocab)
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        xi = noise[part // length, part % length].to(array.device, torch.float32)
        value = value_of(out, xi, temperature)
        write(array, start, value.softmax(1) if out == "softmax" else value)
