"""The readers that read.py compares, and the measurement of one of them in this process.

Every reader gives all rows of an epoch as torch tensors in batches: columns of equal rows as [B, ...], ragged ones as values and
offsets or as one tensor per row, integers in types that torch can sum. Libraries are imported where they are used, so that each process
has only its own, and so that MosaicML's may live in another environment; before the clock starts (see ``measure``).
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

NOISE = ["sequence_id", "input_ids", "logprob", "noise_count", "noise_index", "noise_logprob"]
COLUMNS = {"ids": ["sequence_id", "input_ids"], "noise": NOISE}
RAGGED = ("noise_index", "noise_logprob")

Batches = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Setup:
    """What a reader is to read."""

    dataset: Path
    copies: Path
    """Where copies in other formats lie."""
    columns: list[str]
    batch_size: int
    shuffle_rows: int
    """Rows of a shuffle buffer: as many as those of Stillhouse hold by default, 128 blocks of 65,536 tokens."""
    seed: int

    def shards(self) -> list[str]:
        return [str(path) for path in sorted((self.dataset / "data").glob("train-*.parquet"))]


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """As Batch.torch() does it: integers that torch can hardly compute with are widened."""
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    elif array.dtype == np.uint16:
        array = array.astype(np.int32)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def stillhouse_streaming(setup: Setup, workers: int) -> Batches:
    import stillhouse.torch as st

    ds = st.StreamingShardDataset(setup.dataset, columns=setup.columns, batch_size=setup.batch_size, seed=setup.seed)
    return iter(st.DataLoader(ds, num_workers=workers))


def with_masks(batch: Any) -> Any:
    """A transform of a trainer's: the masks of a step (the batch is given on, so that the sums are those of all readers)."""
    from stillhouse import views

    views.mdlm.mask(batch, mask_id=batch.info.vocab_size)
    views.bd3lm.mask(batch, block_size=16, mask_id=batch.info.vocab_size)
    return batch


def stillhouse_transformed(setup: Setup, workers: int) -> Batches:
    import stillhouse.torch as st

    ds = st.StreamingShardDataset(
        setup.dataset, columns=setup.columns, batch_size=setup.batch_size, seed=setup.seed, transform=with_masks
    )
    return iter(st.DataLoader(ds, num_workers=workers))


def stillhouse_transformed_by_torch(setup: Setup, workers: int) -> Batches:
    import stillhouse.torch as st

    ds = st.StreamingShardDataset(
        setup.dataset, columns=setup.columns, batch_size=setup.batch_size, seed=setup.seed, transform=with_masks
    )
    return iter(torch.utils.data.DataLoader(ds, batch_size=None, num_workers=workers))


def stillhouse_sequential(setup: Setup, _: int) -> Batches:
    import stillhouse

    batches = stillhouse.open(setup.dataset, columns=setup.columns).batches(setup.batch_size)
    return (batch.torch() for batch in batches)


def random_batches(rows: int, setup: Setup) -> Iterator[list[int]]:
    """All rows once, in random order."""
    order = list(range(rows))
    random.Random(setup.seed).shuffle(order)
    return (order[at : at + setup.batch_size] for at in range(0, rows, setup.batch_size))


def stillhouse_random(setup: Setup, _: int) -> Batches:
    import stillhouse

    ds = stillhouse.open(setup.dataset, columns=setup.columns)
    return (ds[rows].torch() for rows in random_batches(len(ds), setup))


def stillhouse_map(setup: Setup, workers: int) -> Batches:
    import stillhouse.torch as st

    ds = st.ShardDataset(setup.dataset, columns=setup.columns, batch_size=setup.batch_size, seed=setup.seed)
    return iter(st.DataLoader(ds, num_workers=workers))


def datasets_streaming(setup: Setup, _: int) -> Batches:
    import datasets

    # it rests for 5 s at the end of an epoch, which guards against a crash of Arrow's threads and says nothing about its rate
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    ds = datasets.load_dataset(
        "parquet", data_files=setup.shards(), split="train", streaming=True, columns=setup.columns
    )
    return ds.shuffle(setup.seed, buffer_size=setup.shuffle_rows).with_format("torch").iter(setup.batch_size)


def datasets_map(setup: Setup, _: int) -> Batches:
    import datasets

    datasets.disable_progress_bars()
    # converted to Arrow once, by the first process; later ones only map the files
    cache = str(setup.copies / "datasets")
    ds = datasets.load_dataset("parquet", data_files=setup.shards(), split="train", cache_dir=cache)
    ds = ds.select_columns(setup.columns).with_format("torch")
    return (ds[rows] for rows in random_batches(len(ds), setup))


def pyarrow_batches(shards: list[str], columns: list[str], batch_size: int) -> Iterator[dict[str, Any]]:
    """Columns as numpy arrays, ragged ones as (values, offsets)."""
    import pyarrow.parquet as pq

    for shard in shards:
        for batch in pq.ParquetFile(shard).iter_batches(batch_size, columns=columns):
            made: dict[str, Any] = {}
            for name in columns:
                column = batch.column(name)
                if name in RAGGED:
                    offsets = column.offsets.to_numpy()
                    made[name] = column.flatten().to_numpy(), offsets - offsets[0]
                elif name == "sequence_id":
                    made[name] = column.to_numpy()
                else:  # flatten() heeds the slice that a batch is of its row group, .values would not
                    made[name] = column.flatten().to_numpy().reshape(len(column), -1)
            yield made


def pyarrow_plain(setup: Setup, _: int) -> Batches:
    for batch in pyarrow_batches(setup.shards(), setup.columns, setup.batch_size):
        yield {
            name: tuple(tensor(part) for part in column) if name in RAGGED else tensor(column)
            for name, column in batch.items()
        }


def mosaic(setup: Setup, workers: int, name: str) -> Batches:
    import streaming

    source = str(setup.copies / name)
    kind: dict[str, Any] = {"local": source}
    if name.endswith("zstd"):  # a "download" that decompresses into a folder of its own, as from an object store
        kind = {"remote": source, "local": tempfile.mkdtemp(dir=setup.copies, prefix="run-")}
    ds = streaming.StreamingDataset(
        **kind, shuffle=True, shuffle_seed=setup.seed, batch_size=setup.batch_size, num_canonical_nodes=1
    )

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for column in setup.columns:
            parts = [row[column] for row in rows]
            if column in RAGGED:
                offsets = np.cumsum([0, *(len(part) for part in parts)])
                made[column] = tensor(np.concatenate(parts)), torch.from_numpy(offsets)
            else:
                made[column] = tensor(np.stack(parts))
        return made

    loader = torch.utils.data.DataLoader(ds, setup.batch_size, num_workers=workers, collate_fn=collate)
    if "remote" in kind:
        atexit.register(shutil.rmtree, kind["local"], ignore_errors=True)
    return iter(loader)


def write_mds(setup: Setup, folder: str, compression: str | None) -> None:
    """The copy for MosaicML's reader: the same columns, in its own types for arrays; nothing where it is there already."""
    if (setup.copies / folder / "index.json").exists():
        return
    from streaming import MDSWriter

    # its environment may have no pyarrow: read.py has put the columns into numpy files
    columns = {name: np.load(setup.copies / "numpy" / f"{name}.npy", mmap_mode="r") for name in setup.columns}
    offsets = {
        name: np.load(setup.copies / "numpy" / f"{name}.offsets.npy") for name in setup.columns if name in RAGGED
    }
    kinds = {
        name: f"ndarray:{column.dtype}" if name in RAGGED else f"ndarray:{column.dtype}:{column.shape[1]}"
        for name, column in columns.items()
        if name != "sequence_id"
    }
    rows = len(columns["sequence_id"])
    with MDSWriter(
        out=str(setup.copies / folder), columns={"sequence_id": "uint64", **kinds}, compression=compression
    ) as out:
        for row in range(rows):
            sample: dict[str, Any] = {}
            for name, column in columns.items():
                if name in RAGGED:
                    sample[name] = np.array(column[offsets[name][row] : offsets[name][row + 1]])
                else:
                    sample[name] = column[row] if name == "sequence_id" else np.array(column[row])
            out.write(sample)


def mosaic_raw(setup: Setup, workers: int) -> Batches:
    return mosaic(setup, workers, f"mds-{len(setup.columns)}-raw")


def mosaic_zstd(setup: Setup, workers: int) -> Batches:
    return mosaic(setup, workers, f"mds-{len(setup.columns)}-zstd")


READERS: dict[str, Callable[[Setup, int], Batches]] = {
    "stillhouse.torch.StreamingShardDataset, shuffled": stillhouse_streaming,
    "stillhouse.torch.ShardDataset, shuffled": stillhouse_map,
    "StreamingShardDataset and its masks, our DataLoader": stillhouse_transformed,
    "StreamingShardDataset and its masks, torch's DataLoader": stillhouse_transformed_by_torch,
    "stillhouse Dataset.batches, in order": stillhouse_sequential,
    "stillhouse ds[rows], at random": stillhouse_random,
    "datasets streaming, shuffle buffer": datasets_streaming,
    "datasets map-style, at random": datasets_map,
    "pyarrow iter_batches, in order": pyarrow_plain,
    "mosaicml-streaming MDS, shuffled": mosaic_raw,
    "mosaicml-streaming MDS zstd, shuffled": mosaic_zstd,
}


def total(column: Any) -> int:
    """The sum of integers, the number of other values: equal for all readers that give the same values in any order."""
    if isinstance(column, (list, tuple)) or hasattr(column, "offsets"):
        # one tensor per row, (values, offsets), or Ragged
        parts = [column.values] if hasattr(column, "offsets") else column[:1] if isinstance(column, tuple) else column
        return sum(total(part) for part in parts)
    return column.numel() if column.is_floating_point() else int(column.sum(dtype=torch.int64))


def measure(reader: str, workers: int, setup: Setup) -> dict[str, Any]:
    """Reads one epoch."""
    # The sums are not what is measured: with several threads they would wait for each other on a busy machine.
    torch.set_num_threads(1)
    # Libraries import parts of themselves at the first batch (pyarrow: pandas, a second). Another instance takes that before the clock.
    if reader.startswith("mosaicml"):
        import streaming  # noqa: F401  # imports all at once, and refuses two instances over one folder
    else:
        for batch in READERS[reader](setup, 0):
            total(batch["input_ids"])
            break
    begin = time.perf_counter()
    batches = READERS[reader](setup, workers)
    opened = time.perf_counter()
    rows, tokens, first, sums = 0, 0, 0.0, dict.fromkeys(setup.columns, 0)
    for batch in batches:
        if not rows:
            first = time.perf_counter() - begin
        rows += len(batch["input_ids"])
        tokens += batch["input_ids"].numel()
        for name in setup.columns:
            sums[name] = (sums[name] + total(batch[name])) % (1 << 64)
    seconds = time.perf_counter() - opened
    return {"rows": rows, "tokens": tokens, "seconds": seconds, "first": first, "sums": sums}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures one reader; read.py calls this.")
    parser.add_argument("what", choices=["measure", "write-mds"])
    parser.add_argument("setup")
    given = parser.parse_args()
    spec = json.loads(given.setup)
    reader, workers = spec.pop("reader", ""), spec.pop("workers", 0)
    setup = Setup(**{**spec, "dataset": Path(spec["dataset"]), "copies": Path(spec["copies"])})
    if given.what == "measure":
        print(json.dumps(measure(reader, workers, setup)))
    else:
        write_mds(setup, f"mds-{len(setup.columns)}-raw", None)
        write_mds(setup, f"mds-{len(setup.columns)}-zstd", "zstd")


if __name__ == "__main__":
    main()
