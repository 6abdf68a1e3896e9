"""What another coding of the corrections would cost: from a job to a simulation, which writes nothing but figures.

    python noise_bytes.py --work demo-out/noise-bytes --program stillhouse --teacher assets/teacher-nano-gpt2 --tokens 2000 --json noise_bytes-nano-gpt2.json

Stored today are, per token, a count (zstd), and per correction an id (16 or 32 bits) and ln p (f16). Other codings are looked at:

* **ids by the seeded order.** Who replays noise knows e_k of every entry from the seed. A correction matters where 1/e_k is large, so the corrected entries stand near
  the beginning of the entries in the order of e_k: the gap to the place before is coded by its bucket of powers of two and the bits within it.
* **coarser values.** ln p from 0 to −24 in 8, 10 or 12 bits.
* **a coarser logprob.** ln p_x in steps so fine that they move softmax(ξ) by a tenth of the tolerance at most. Corrections are searched beside it in either case.

What is coarser costs tolerance, so corrections are not those of the shards: every token is encoded anew against the dense noise of the same seed (a second data set, codec
`dense`), as the encoder does it: rivals of the observed token first, with values that it wins against; then the entries that change most, the fewest whose total variation,
rounding included, is within the tolerance. Where none are, the token escapes: it keeps the f16 values of the shards. (Ours also chooses the side of a rounding, so it would escape
less.) `f16` is the same search with the values of the format, beside what the shards hold.

Costs are held-out code lengths: the table of a half of the rows codes the other half, counts + ½, all symbols of the alphabet in it. An escape costs its flag, paid by every token.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from origin import machine, marked

import stillhouse

BITS = (8, 10, 12)
"""Widths of coarser values."""
NATS = 24
"""What they cover; a token with a correction below escapes."""
COLUMNS = ("logprob", "noise_count", "noise_index", "noise_logprob")
CHARACTERS = 6000
TABLE = 8
"""Bits of a value that are coded by a table; those below are nearly uniform and written as they are."""
MANY = 63
"""Counts from here on take 16 bits more."""
BUCKETS = 18
"""Of gaps below 2^18."""
Array = np.ndarray[Any, Any]


def job(args: argparse.Namespace, name: str, noise: dict[str, Any]) -> pathlib.Path:
    """A data set of the same rows and seed as all others."""
    folder: pathlib.Path = args.work / name
    if (folder / "manifest.json").exists():
        return folder
    ends = (
        {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
        if args.teacher.suffix == ".gguf"
        else {"path": str(args.teacher)}
    )
    made = {
        "version": 1, "name": f"noise-bytes-{name}", "seed": 42, "tokenizer": ends,
        "input": {
            "format": "jsonl", "paths": [str(args.corpus)],
            "sql": f"SELECT substr(text, 1, {CHARACTERS}) AS text FROM input WHERE year >= 1900 ORDER BY year LIMIT {args.documents}",
        },
        "pack": {"mode": "wrap", "length": args.length, "separator": "eos", "boundary": "bos_eos", "remainder": "drop"},
        "extract": {"teacher": {"path": str(args.teacher), "device": "cpu", "dtype": "f32"}, "noise": noise},
        "output": {"path": str(folder), "shard_megabytes": 4096},  # one split: rows are wrapped within a split
    }  # fmt: skip
    file = args.work / f"{name}.json"
    file.write_text(json.dumps(made))
    subprocess.run([args.program, "run", file], check=True, stdout=subprocess.DEVNULL)
    return folder


def held_out_bits(symbols: Sequence[int], rows: Sequence[int], alphabet: int) -> float:
    """Bits of all symbols, each coded by the table of the other half of the rows."""
    of, half = np.asarray(symbols, np.int64), np.asarray(rows) % 2
    bits = 0.0
    for mine in (0, 1):
        counts = np.bincount(of[half != mine], minlength=alphabet) + 0.5
        bits -= float(np.log2(counts[of[half == mine]] / counts.sum()).sum())
    return bits


def entropy_bits(symbols: Sequence[int]) -> float:
    """Plug-in entropy per symbol, which is too low for few symbols: for comparison alone."""
    _, counts = np.unique(np.asarray(symbols), return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log2(p)).sum())


@dataclass
class Token:
    """A token's exact noise: E and e of every entry, without x; e_0 and ln p_x."""

    large: Array
    e: Array
    x: int
    e0: float
    logprob: float
    added: Array = field(init=False)
    weights: Array = field(init=False)
    excess: Array = field(init=False)

    def __post_init__(self) -> None:
        self.added = np.maximum(self.large - self.e, 0.0)
        self.added[self.x] = 0.0
        self.weights = 1 / self.large
        self.excess = np.maximum(1 / self.e - self.weights, 0.0)
        self.excess[self.x] = 0.0

    def variation(self, index: Array, values: Array, shift_x: float) -> float:
        """Total variation where these entries have these ln p and ln p_x is off by ``shift_x``."""
        there = self.weights + self.excess
        np.put(there, index, 1 / (self.e[index] + np.exp(values) * self.e0))
        there[self.x] = self.weights[self.x] * math.exp(-shift_x)
        return float(np.maximum(there / there.sum() - self.weights / self.weights.sum(), 0).sum())

    def encoded(
        self, grid: Grid, tolerance: float, shift_x: float = 0.0, most: int = 1024
    ) -> tuple[Array, Array] | None:
        """The corrected entries and their values, numbers of ``grid``; None where they do not keep the tolerance."""
        bar = math.exp(shift_x) * (1 + min(2**-12, tolerance))
        least = self.added * bar / self.e0 - self.e / self.e0  # what p̂ has to be for x to win
        first = np.flatnonzero(least > 0)
        count = min(most, len(self.e) - 1)
        near = np.argpartition(-self.excess, count)[:count]
        rest = np.setdiff1d(near, first)
        order = np.concatenate([first, rest[np.argsort(-self.excess[rest], kind="stable")]])
        order = order[self.added[order] > 0]
        steps = grid.of(np.log(self.added[order] / self.e0), least[order])
        values = grid.values(steps)
        if self.variation(order[: len(first)], values[: len(first)], shift_x) <= tolerance:
            high = len(first)
        else:
            low, high = len(first), len(order)
            if self.variation(order, values, shift_x) > tolerance:
                # more entries bring more rounding: some prefix of few may do where all do not
                high = next(
                    (
                        n
                        for n in range(low, min(high, low + 64))
                        if self.variation(order[:n], values[:n], shift_x) <= tolerance
                    ),
                    -1,
                )
                if high < 0:
                    return None
            else:
                while low < high:
                    middle = (low + high) // 2
                    if self.variation(order[:middle], values[:middle], shift_x) <= tolerance:
                        high = middle
                    else:
                        low = middle + 1
        if not grid.holds(steps[:high]):
            return None
        return order[:high], steps[:high]


class Grid:
    """Coarse values: ln p in steps of 24 nats / 2^bits; ``bits`` 0: f16."""

    def __init__(self, bits: int) -> None:
        self.bits, self.step = bits, NATS / 2**bits

    def values(self, steps: Array) -> Array:
        return steps * -self.step if self.bits else steps

    def of(self, logprobs: Array, least: Array) -> Array:
        """The nearest, or the next above where that is less than ``least`` (a p̂)."""
        if not self.bits:
            made = logprobs.astype(np.float16)
            low = np.exp(made.astype(np.float64)) < least
            made[low] = np.nextafter(made[low], np.float16(np.inf))
            return made.astype(np.float64)
        steps = np.round(logprobs / -self.step)
        steps -= np.exp(steps * -self.step) < least
        return np.maximum(steps, 0)

    def holds(self, steps: Array) -> bool:
        return not self.bits or bool((steps < 2**self.bits).all())


@dataclass
class Coded:
    """What one coding of all tokens has to write."""

    counts: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    escaped: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    rows_of_gaps: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    rows_of_values: list[int] = field(default_factory=list)
    in_f16: int = 0

    def add(self, row: int, places: Array, steps: Array | None) -> None:
        """A token; ``steps``: None where it escapes."""
        gaps = np.diff(np.sort(places), prepend=-1)
        self.counts.append(len(places))
        self.rows.append(row)
        self.escaped.append(int(steps is None))
        self.buckets += np.floor(np.log2(np.maximum(gaps, 1))).astype(int).tolist()
        self.rows_of_gaps += [row] * len(places)
        if steps is None:
            self.in_f16 += len(places)
        else:
            self.values += steps.astype(int).tolist()
            self.rows_of_values += [row] * len(steps)

    def value_bits(self, bits: int) -> float:
        """The first 8 bits by table, the rest as they are."""
        first = [value >> (bits - TABLE) for value in self.values]
        return held_out_bits(first, self.rows_of_values, 2**TABLE) + (bits - TABLE) * len(self.values)

    def cost(self, bits: int) -> dict[str, float]:
        """Bytes per token, by part."""
        tokens = len(self.counts)
        parts = {
            "counts": held_out_bits([min(n, MANY) for n in self.counts], self.rows, MANY + 1)
            + 16 * sum(n >= MANY for n in self.counts),
            "flags": held_out_bits(self.escaped, self.rows, 2),
            "places": held_out_bits(self.buckets, self.rows_of_gaps, BUCKETS) + sum(self.buckets),
            "values": self.value_bits(bits) + 16 * self.in_f16,
        }
        return {name: of / 8 / tokens for name, of in parts.items()}


def coarse_of(tolerance: float) -> int:
    """Bits of 24 nats that move softmax(ξ) by a tenth of the tolerance at most: half a step h of ln p_x by tanh(h/4)."""
    return next(bits for bits in range(1, 33) if math.tanh(NATS / 2**bits / 8) <= tolerance / 10)


def logprob_bytes(logprobs: Array, rows: Array, wide: int) -> float:
    """Bytes of a coarse ln p_x; those below −24 nats escape by a symbol of their own and take 32 bits."""
    steps = np.round(logprobs / (-NATS / 2**wide)).astype(np.int64)
    low = steps >= 2**wide
    buckets = np.where(low, wide + 1, np.floor(np.log2(np.where(low, 1, steps) + 1)).astype(int))
    bits = held_out_bits(buckets.tolist(), rows.tolist(), wide + 2)
    return (bits + float(np.where(low, 32, buckets).sum())) / 8 / len(logprobs)


def look(replay: Any, dense: Any, most: int, tolerance: float, wide: int) -> dict[str, Any]:
    """Every width over so many tokens, evenly spread."""
    info = replay.info
    coded = {bits: Coded() for bits in BITS}
    logprobs, rows, stored, again, largest = [], [], [], [], 0.0
    every = max(1, len(replay) * (info.length - 2) // most)
    grids = {bits: Grid(bits) for bits in (*BITS, 0)}
    seen = 0
    for number, row in enumerate(replay):
        xi_row = None
        counts = np.asarray(row["noise_count"])[0].astype(int)
        ends = counts.cumsum()
        for position, x in enumerate(row["input_ids"]):
            logprob = float(row["logprob"][position])
            if logprob == 0:
                continue
            seen += 1
            if seen % every:
                continue
            if xi_row is None:
                exact = dense[number]
                if list(exact["input_ids"]) != list(row["input_ids"]) or exact["sequence_id"] != row["sequence_id"]:
                    raise SystemExit(
                        f"row {number} of {dense.url} is not that of {replay.url}; valid: data sets of the same rows"
                    )
                xi_row = np.asarray(exact["noise"], np.float64).reshape(info.length, info.vocab_size)
            large = np.exp(-xi_row[position])
            prior = stillhouse.noise.prior(
                info.noise.seed, int(row["sequence_id"]), position, info.vocab_size, out="gumbel"
            )
            e = np.exp(-np.asarray(prior, np.float64).reshape(-1))
            token = Token(large, e, int(x), large[x] / math.exp(logprob), logprob)
            here = slice(ends[position] - counts[position], ends[position])
            index = row["noise_index"][here].astype(int)
            sums = {int(k): 0.0 for k in index}
            for k, value in zip(index, row["noise_logprob"][here].astype(np.float64)):
                sums[int(k)] += math.exp(value)
            kept = np.array(list(sums), int)
            largest = max(
                largest, token.variation(kept, np.log(np.array(list(sums.values()) or [1.0]))[: len(kept)], 0.0)
            )
            place = np.empty(len(e), np.int64)
            place[np.argsort(e)] = np.arange(len(e))
            stored.append(len(index))
            simulated = token.encoded(grids[0], tolerance)
            again.append(len(simulated[0]) if simulated else len(index))
            step = NATS / 2**wide
            shift = round(logprob / -step) * -step - logprob
            for bits, of in coded.items():
                found = token.encoded(grids[bits], tolerance, shift)
                of.add(number, place[found[0] if found else index], found[1] if found else None)
            logprobs.append(logprob)
            rows.append(number)
    logprob_cost = logprob_bytes(np.asarray(logprobs), np.asarray(rows), wide)
    tokens = len(stored)
    values = {}
    for bits, of in coded.items():
        cost = of.cost(bits)
        values[bits] = {
            "corrections_per_token": sum(of.counts) / tokens, "escaped_tokens": sum(of.escaped) / tokens, "values": len(of.values),
            "bits_of_a_value": of.value_bits(bits) / max(1, len(of.values)), "plug_in_bits_of_a_value": entropy_bits(of.values),
            "bytes_per_token": cost, "noise_bytes_per_token": sum(cost.values()),
        }  # fmt: skip
    return {
        "tolerance": tolerance, "tokens": tokens, "vocab_size": info.vocab_size, "corrections_per_token": sum(stored) / tokens,
        "corrections_per_token_of_the_search_in_f16": sum(again) / tokens, "largest_variation_as_stored": largest,
        "logprob": {"bits_wide": wide, "bytes_per_token": logprob_cost}, "values": values,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for data sets")
    parser.add_argument("--program", default="stillhouse", help="the stillhouse program")
    parser.add_argument("--teacher", type=pathlib.Path, required=True, help="a folder, or a .gguf with its tokenizer")
    root = pathlib.Path(__file__).resolve().parents[2]
    parser.add_argument("--corpus", type=pathlib.Path, default=root / "assets/corpus/sotu-small.jsonl.gz")
    parser.add_argument(
        "--documents", type=int, default=8, help=f"of the corpus from 1900 on, {CHARACTERS} characters of each"
    )
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=5000, help="how many tokens to look at")
    parser.add_argument("--tolerances", nargs="+", default=["1e-3", "1e-2"])
    parser.add_argument("--json", type=pathlib.Path, required=True, help="where the figures go")
    args = parser.parse_args(argv)
    began = time.monotonic()
    for name in ("work", "teacher", "corpus"):
        setattr(args, name, getattr(args, name).resolve())
    args.work.mkdir(parents=True, exist_ok=True)
    dense = stillhouse.open(str(job(args, "dense", {"codec": "dense", "precision": "f32"})))
    result: dict[str, Any] = {
        "experiment": "noise bytes", "teacher": args.teacher.name, "documents": args.documents, "length": args.length, "machine": machine(1), "data_sets": [],
    }  # fmt: skip
    marked(result)
    for tolerance in args.tolerances:
        replay = stillhouse.open(
            str(job(args, f"replay-{tolerance}", {"codec": "replay", "tolerance": float(tolerance)}))
        )
        found = look(replay, dense, args.tokens, float(tolerance), coarse_of(float(tolerance)))
        shards = replay.manifest["shards"]
        tokens = sum(shard["tokens"] for shard in shards)
        found["stored_tokens"] = tokens
        found["stored_bytes_per_token"] = {
            name: sum(s["column_bytes"][name] for s in shards) / tokens for name in COLUMNS
        }
        result["data_sets"].append(found)
        result["seconds"] = round(time.monotonic() - began)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({key: of for key, of in found.items() if key != "values"}), flush=True)
    return result


if __name__ == "__main__":
    main()
