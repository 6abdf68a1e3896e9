"""Compares readers: one epoch of a data set with noise into torch tensors, from local disk with a warm page cache.

    python read.py DATASET --mosaic-python /path/to/venv/bin/python > table.md

Each figure is the median of ``--runs`` runs, each in a fresh process, all readers taken in turn. Libraries are imported, and a first batch of
another instance is read, before the clock starts. The rate is from the opened data set to the last batch, with the start of workers and the filling of shuffle buffers; "first batch"
is from before opening. torch computes with one thread. Every reader must give the same number of rows, the same sums of integer columns and the same number of other values, else the script fails. Copies in other
formats are made once, beside the clock, in ``--copies``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import readers

WORKERS = {  # 2 as well where the reader is a DataLoader's data set
    "StreamingShardDataset and its masks, our DataLoader": (0, 1, 2),
    "StreamingShardDataset and its masks, torch's DataLoader": (0, 1, 2),
    "mosaicml-streaming MDS, shuffled": (0, 2),
    "mosaicml-streaming MDS zstd, shuffled": (0, 2),
}


def call(python: str, what: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Runs readers.py in a process of its own."""
    done = subprocess.run(
        [python, readers.__file__, what, json.dumps(spec)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{spec.get('reader', what)}: failed\n{done.stderr}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {}


def to_numpy(dataset: Path, copies: Path, columns: list[str]) -> None:
    """Columns as .npy files, from which the MDS copy is written."""
    folder = copies / "numpy"
    columns = [name for name in columns if not (folder / f"{name}.npy").exists()]
    if not columns:
        return
    folder.mkdir(parents=True, exist_ok=True)
    shards = readers.Setup(dataset, copies, columns, 1, 1, 0).shards()
    batches = list(readers.pyarrow_batches(shards, columns, 1024))
    for name in columns:
        parts = [batch[name] for batch in batches]
        if name in readers.RAGGED:
            lengths = np.concatenate([np.diff(offsets) for _, offsets in parts])
            np.save(folder / f"{name}.offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
            parts = [values for values, _ in parts]
        np.save(folder / f"{name}.npy", np.concatenate(parts))


def warm(folder: Path) -> None:
    """Into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "dataset",
        type=Path,
        help="folder of a finished data set with noise (codec replay), or without for --columns ids",
    )
    parser.add_argument("--copies", type=Path, help="folder for the copies, by default DATASET-copies")
    parser.add_argument("--mosaic-python", help="python with mosaicml-streaming and torch; without it, MDS is left out")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--columns", choices=list(readers.COLUMNS), nargs="+", default=list(readers.COLUMNS))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    dataset = args.dataset.resolve()
    copies = (args.copies or dataset.with_name(dataset.name + "-copies")).resolve()
    length = json.loads((dataset / "manifest.json").read_text())["job"]["pack"]["length"]

    def spec(columns: str, **more: Any) -> dict[str, Any]:
        return {
            "dataset": str(dataset), "copies": str(copies), "columns": readers.COLUMNS[columns], "batch_size": args.batch_size,
            "shuffle_rows": 128 * 32_768 // length, "seed": args.seed, **more,
        }  # fmt: skip

    if args.mosaic_python:
        for columns in args.columns:
            to_numpy(dataset, copies, readers.COLUMNS[columns])
            call(args.mosaic_python, "write-mds", spec(columns))
    cases = [
        (columns, name, workers)
        for columns in args.columns
        for name in readers.READERS
        for workers in WORKERS.get(name, (0,))
        if args.mosaic_python or not name.startswith("mosaicml")
    ]
    if any(name.startswith("datasets map") for _, name, _ in cases):
        call(sys.executable, "measure", spec("ids", reader="datasets map-style, at random"))
    warm(dataset)
    warm(copies)

    results: dict[tuple[str, str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    expected: dict[str, tuple[int, dict[str, int]]] = {}
    for run in range(args.runs):
        for columns, name, workers in cases:
            python = args.mosaic_python if name.startswith("mosaicml") else sys.executable
            got = call(python, "measure", spec(columns, reader=name, workers=workers))
            facts = (got["rows"], got["sums"])
            if expected.setdefault(columns, facts) != facts:  # somebody skips work
                raise SystemExit(f"{name}: gave {facts}, others {expected[columns]}")
            results[columns, name, workers].append(got)
            print(f"run {run + 1}: {name}, {workers} workers, {columns}: {got['seconds']:.2f} s", file=sys.stderr)

    for columns in args.columns:
        rows, _ = expected[columns]
        print(
            f"\n{rows:,} rows of {length:,} tokens, batches of {args.batch_size}, columns {', '.join(readers.COLUMNS[columns])}; ",
            end="",
        )
        print(f"medians of {args.runs} runs, warm page cache\n")
        print("| reader | workers | rows/s | tokens/s | slowest to fastest run, tokens/s | first batch, s |")
        print("|---|---|---|---|---|---|")
        for (of, name, workers), runs in results.items():
            if of == columns:
                rates = [got["tokens"] / got["seconds"] for got in runs]
                rate, first = statistics.median(rates), statistics.median(got["first"] for got in runs)
                spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
                print(f"| {name} | {workers} | {rate / length:,.0f} | {rate:,.0f} | {spread} | {first:.2f} |")
    print(f"\nOn disk: data set {megabytes(dataset / 'data'):,.1f} MB", end="")
    for folder in sorted(copies.glob("mds-*")):
        print(f", {folder.name} {megabytes(folder):,.1f} MB", end="")
    print()


if __name__ == "__main__":
    main()
