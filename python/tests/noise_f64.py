"""The noise format in float64 numpy, written from docs/FORMAT.md alone, and batches with noise for the tests.

Philox is that of the house's reference (tests/python/noise_reference.py), which shares no code with the package.
"""

from __future__ import annotations

import numpy as np
from scipy.special import log_ndtr, ndtri

import stillhouse

M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
MASK = np.uint64(0xFFFFFFFF)


def philox(counter, key):
    c = [np.asarray(x, dtype=np.uint64) & MASK for x in counter]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(M0), c[2] * np.uint64(M1)
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & MASK,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & MASK,
        ]
        k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF
    return c


def exponentials(seed, draw, sequence_id, position, vocab):
    """e_0 and e [V] of one token."""
    s = (seed + draw * 0x9E3779B97F4A7C15) % 2**64
    key = (s & 0xFFFFFFFF, s >> 32)
    quads = np.append(np.arange((vocab + 3) // 4, dtype=np.uint64), np.uint64(0xFFFFFFFF))
    one = np.ones(len(quads), np.uint64)
    low, high = int(sequence_id) & 0xFFFFFFFF, int(sequence_id) >> 32
    words = philox((quads, one * np.uint64(position), one * np.uint64(low), one * np.uint64(high)), key)
    e = -np.log1p(-(np.stack(words, 1).astype(np.float64) + 0.5) * 2.0**-32)
    return e[-1, 0], e[:-1].reshape(-1)[:vocab]


def gumbel(seed, draw, sequence_id, position, vocab, x=None, logprob=0.0, index=(), values=()):
    """ξ [V] of one stored token, or prior noise without one."""
    e0, e = exponentials(seed, draw, sequence_id, position, vocab)
    p = np.zeros(vocab)
    np.add.at(p, np.asarray(index, np.int64), np.exp(np.asarray(values, np.float64)))
    xi = -np.log(e + p * e0)
    if x is not None:
        xi[x] = -float(logprob) - np.log(e0)
    return xi


def normal_quantile(xi):
    """Φ⁻¹(exp(−exp(−ξ))) with both tails exact: through log Φ where ndtri would underflow."""
    e = np.exp(-xi)
    tail = np.where(e >= np.log(2), np.exp(-e), -np.expm1(-np.minimum(e, np.log(2))))
    z = ndtri(np.maximum(tail, 1e-300))
    far = xi > 600  # −ln(1 − Φ(z)) = ξ, by bisection
    if far.any():
        low, high = np.zeros(far.sum()), np.sqrt(2 * xi[far])
        for _ in range(200):
            middle = (low + high) / 2
            above = -log_ndtr(-middle) > xi[far]
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        z[far] = -low
    return np.where(e >= np.log(2), z, -z)


def output(xi, out, temperature=1.0):
    if out == "softmax":
        w = np.exp(temperature * (xi - xi.max()))
        return w / w.sum()
    if out == "gumbel":
        return temperature * xi
    if out == "gaussian":
        return temperature * normal_quantile(xi)
    return np.exp(-np.exp(-xi))


def batch(vocab, rows=3, length=5, draws=1, seed=11, data_seed=0, most=6, narrow=True, surest=-30.0):
    """A batch of made-up columns, with repeated and with heavy corrections, and positions that are certain."""
    rng = np.random.default_rng(data_seed)
    ids = rng.integers(0, vocab, (rows, length), dtype=np.int32)
    logprob = -rng.exponential(3.0, (rows, length)).astype(np.float32)
    logprob.reshape(-1)[1::7] = surest  # an unlikely token: ξ_x far beyond the others
    certain = rng.random((rows, length)) < 0.2
    logprob[certain] = 0
    count = rng.integers(0, most + 1, (rows, draws, length)).astype(np.uint16 if narrow else np.int32)
    count[np.broadcast_to(certain[:, None], count.shape)] = 0
    total = int(count.sum())
    index = rng.integers(0, vocab, total)
    # Every third one repeats the one before: values of an entry add up.
    index[1::3] = index[:-1:3][: len(index[1::3])]
    owner = np.repeat(np.arange(count.size), count.reshape(-1))
    index = index[np.lexsort((index, owner))]
    values = -rng.exponential(4.0, total) - 1.1
    values[::5] = -1.2
    offsets = np.concatenate([[0], count.sum((1, 2)).cumsum()]).astype(np.int64)
    sequence_id = rng.integers(0, 2**64, rows, dtype=np.uint64)
    wide = narrow and vocab <= 65536
    columns = {
        "sequence_id": sequence_id,
        "input_ids": ids,
        "logprob": logprob,
        "noise_count": count if draws > 1 or not narrow else count[:, 0],
        "noise_index": stillhouse.Ragged(index.astype(np.uint16 if wide else np.uint32), offsets),
        "noise_logprob": stillhouse.Ragged(values.astype(np.float16 if narrow else np.float32), offsets),
    }
    info = stillhouse.Info(vocab, length, stillhouse.NoiseInfo("replay", seed, draws, 1e-3))
    return stillhouse.Batch(columns, info)


def expected_gumbel(columns, draw=0):
    """ξ [B, L, V] of a batch, token by token."""
    info = columns.info
    ids, offsets = columns["input_ids"], columns["noise_index"].offsets
    rows, length = ids.shape
    draws = info.noise.draws
    count = columns["noise_count"].reshape(rows, draws, length)
    xi = np.empty((rows, length, info.vocab_size))
    for b in range(rows):
        at = int(offsets[b] + count[b, :draw].sum(dtype=np.int64))
        for i in range(length):
            span = slice(at, at + int(count[b, draw, i]))
            at = span.stop
            xi[b, i] = gumbel(
                info.noise.seed, draw, columns["sequence_id"][b], i, info.vocab_size,
                ids[b, i], columns["logprob"][b, i],
                columns["noise_index"].values[span], columns["noise_logprob"].values[span],
            )  # fmt: skip
    return xi


def expected(columns, out, temperature=1.0, draw=0):
    xi = expected_gumbel(columns, draw)
    return np.stack([[output(token, out, temperature) for token in row] for row in xi])


def error_of(got, exact, out, temperature=1.0):
    """The worst error in the unit that `replay` documents for this output."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact)
    assert np.isfinite(got).all()
    if out == "softmax":
        # what is 26 orders below the largest may be 0
        return (np.abs(got - exact) / (2e-5 * max(1.0, temperature) * exact + 1e-26)).max()
    if out == "uniform":
        return np.abs(got - exact).max() / 1e-6
    return (np.abs(got - exact) / np.maximum(np.abs(exact), max(1.0, temperature))).max() / 4e-6
