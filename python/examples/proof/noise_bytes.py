"""What another coding of the corrections would cost: a simulation over a data set, which writes nothing but figures.

    python noise_bytes.py demo-out/demo-smollm2 --tokens 4000 --json noise_bytes.json

Stored today are, per token, a count (zstd), and per correction an id (16 or 32 bits) and ln p (f16). Two other codings are looked at:

* **ids by the seeded order.** Who replays noise knows e_k of every entry from the seed. A correction matters where 1/e_k is large, so the corrected
  entries stand near the beginning of the entries in the order of e_k, and their places there are small numbers. Cost: the entropy of the gaps
  between places, in buckets of powers of two, plus the bits within a bucket.
* **Coarser values.** ln p from 0 to −24 in 8 bits (steps of 0.09 nat, which move p by 4.8 % at most), 10 bits or 12. The error is judged as the
  encoder would: by the total variation that it adds to softmax(ξ) of the token. Tokens where it adds more than a tenth of the tolerance keep f16.
* **A coarser logprob.** ln p_x moves E_x alone: half a step h of it moves softmax(ξ) by a total variation of tanh(h/4) at most. The fewest bits are taken
  that keep this below a tenth of the tolerance. Cost: the entropy of the bucket of powers of two plus the bits within it.

Entropies are those of an adaptive coder in the limit: a real one is a few percent above.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import stillhouse

BITS = (8, 10, 12)
"""Widths of coarser values."""
NATS = 24
"""What they cover; what is below keeps f16."""


@dataclass
class Found:
    """What was counted over the tokens."""

    counts: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    values: dict[int, list[int]] = field(default_factory=lambda: {bits: [] for bits in BITS})
    added: dict[int, list[float]] = field(default_factory=lambda: {bits: [] for bits in BITS})


def entropy_bits(symbols: list[int]) -> float:
    """Bits per symbol."""
    _, counts = np.unique(np.asarray(symbols), return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log2(p)).sum())


def tokens_of(ds: Any, most: int) -> Iterator[tuple[int, int, int, float, np.ndarray, np.ndarray]]:
    """(sequence, position, token, ln p, corrected ids, their ln p) of predicted tokens, draw 0, spread over the data set."""
    every = max(1, len(ds) * ds.info.length // most)
    seen = 0
    for row in ds:
        counts = np.asarray(row["noise_count"])[0].astype(int)
        ends = counts.cumsum()
        for position, token in enumerate(row["input_ids"]):
            seen += 1
            if seen % every or row["logprob"][position] == 0:
                continue
            here = slice(ends[position] - counts[position], ends[position])
            index, logprob = row["noise_index"][here].astype(int), row["noise_logprob"][here].astype(np.float64)
            yield int(row["sequence_id"]), position, int(token), float(row["logprob"][position]), index, logprob


def added_variation(
    e: np.ndarray, token: int, logprob: float, e0: float, index: np.ndarray, logprobs: np.ndarray, coarse: np.ndarray
) -> float:
    """Total variation between softmax(ξ̂) with the stored values and with coarse ones."""

    def weights(values: np.ndarray) -> np.ndarray:
        large = e.copy()
        large[token] = np.exp(logprob) * e0
        np.add.at(large, index, np.exp(values) * e0)
        return 1 / large / (1 / large).sum()

    return float(np.abs(weights(logprobs) - weights(coarse)).sum() / 2)


def steps_of(logprobs: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of the coarse values."""
    return np.clip(np.round(logprobs * (-(2**bits) / NATS)), 0, 2**bits - 1).astype(int)


def look(ds: Any, most: int) -> Found:
    """Counts over so many tokens."""
    found, info = Found(), ds.info
    for sequence, position, token, logprob, index, logprobs in tokens_of(ds, most):
        found.counts.append(len(index))
        if not len(index):
            for bits in BITS:
                found.added[bits].append(0.0)
            continue
        prior = stillhouse.noise.prior(info.noise.seed, sequence, position, info.vocab_size, out="gumbel")
        e = np.exp(-np.asarray(prior, np.float64).reshape(-1))
        place = np.empty(len(e), np.int64)
        place[np.argsort(e)] = np.arange(len(e))
        places = np.sort(place[np.unique(index)])
        gaps = np.diff(places, prepend=-1)
        found.places += places.tolist()
        found.buckets += np.floor(np.log2(gaps)).astype(int).tolist()
        e0 = own_draw(info, sequence, position, token, logprob, index, logprobs)
        for bits in BITS:
            steps = steps_of(logprobs, bits)
            found.values[bits] += steps.tolist()
            added = added_variation(e, token, logprob, e0, index, logprobs, steps * (-NATS / 2**bits))
            found.added[bits].append(added)
    return found


def coarse_logprob(ds: Any) -> dict[str, float]:
    """What ln p_x of all predicted tokens would cost, in steps that the tolerance allows."""
    kept = ds.select_columns(["logprob"])
    logprobs = np.concatenate([row["logprob"].astype(np.float64) for row in kept])
    predicted = logprobs[logprobs != 0]
    wide = next(bits for bits in range(1, 33) if math.tanh(NATS / 2**bits / 8) <= ds.info.noise.tolerance / 10)
    steps = np.round(predicted * (-(2**wide) / NATS)).astype(np.int64)
    escape = float((steps >= 2**wide).mean())
    buckets = np.floor(np.log2(steps[steps < 2**wide] + 1)).astype(int)
    bits = (1 - escape) * (entropy_bits(buckets.tolist()) + float(buckets.mean())) + escape * 32
    share = len(predicted) / len(logprobs)
    return {
        "bits_wide": wide,
        "added_variation_bound": math.tanh(NATS / 2**wide / 8),
        "below_24_nats": escape,
        "bytes_per_token": share * bits / 8,
    }


def own_draw(
    info: Any, sequence: int, position: int, token: int, logprob: float, index: np.ndarray, logprobs: np.ndarray
) -> float:
    """e_0 of a token: its own replayed noise is −ln(p·e_0)."""
    batch = stillhouse.Batch(
        {
            "sequence_id": np.array([sequence], np.uint64),
            "input_ids": np.full((1, position + 1), token, np.int32),
            "logprob": np.full((1, position + 1), logprob, np.float32),
            "noise_count": np.r_[np.zeros(position, np.uint16), np.uint16(len(index))].reshape(1, 1, -1),
            "noise_index": stillhouse.Ragged(index.astype(np.uint32), np.array([0, len(index)])),
            "noise_logprob": stillhouse.Ragged(logprobs.astype(np.float32), np.array([0, len(index)])),
        },
        info=info,
    )
    at = np.arange(position + 1)[None] == position
    xi = stillhouse.noise.replay(batch, positions=at, out="gumbel")
    return float(np.exp(-np.asarray(xi).reshape(-1)[token] - logprob))


def stored_bytes(ds: Any) -> dict[str, int]:
    """Bytes of the columns of the noise in the shards."""
    names = ("logprob", "noise_count", "noise_index", "noise_logprob")
    return {name: sum(shard["column_bytes"][name] for shard in ds.manifest["shards"]) for name in names}


def report(ds: Any, found: Found) -> dict[str, Any]:
    """Figures per token and per correction."""
    tokens, corrections = len(found.counts), sum(found.counts)
    stored = {name: size / sum(s["tokens"] for s in ds.manifest["shards"]) for name, size in stored_bytes(ds).items()}
    each, tolerance = corrections / tokens, ds.info.noise.tolerance
    of_place = (entropy_bits(found.buckets) * len(found.buckets) + sum(found.buckets)) / corrections
    count_bits = entropy_bits(found.counts)
    coarse = coarse_logprob(ds)
    values = {}
    for bits in BITS:
        added, counts = np.asarray(found.added[bits]), np.asarray(found.counts)
        escape = float(counts[added > tolerance / 10].sum() / corrections)
        value = (1 - escape) * entropy_bits(found.values[bits]) + escape * 16
        noise = (count_bits + each * (of_place + value)) / 8
        values[bits] = {
            "bits": value, "corrections_in_f16": escape, "added_variation_mean": float(added.mean()), "added_variation_largest": float(added.max()),
            "noise_bytes_per_token": noise, "with_logprob": noise + stored["logprob"],
            "with_coarse_logprob": noise + coarse["bytes_per_token"],
        }  # fmt: skip
    return {
        "experiment": "noise bytes", "vocab_size": ds.info.vocab_size, "tolerance": tolerance, "tokens": tokens,
        "corrections_per_token": each, "median_place": float(np.median(found.places)), "largest_place": int(max(found.places)),
        "bits": {"count": count_bits, "place": of_place, "id": float(np.log2(ds.info.vocab_size))}, "values": values,
        "logprob": coarse, "stored_bytes_per_token": stored,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset", help="a finished data set with replayed noise")
    parser.add_argument("--tokens", type=int, default=4000, help="how many tokens to look at")
    parser.add_argument("--json", type=pathlib.Path, help="where the figures go")
    args = parser.parse_args(argv)
    ds = stillhouse.open(args.dataset)
    result = report(ds, look(ds, args.tokens))
    result["command"] = f"python noise_bytes.py {pathlib.Path(args.dataset).name} --tokens {args.tokens}"
    result["source"] = f"{ds.manifest['job']['name']}, teacher {pathlib.Path(ds.manifest['teacher']['source']).name}"
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return result


if __name__ == "__main__":
    main()
