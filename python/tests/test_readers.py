"""The same shards in pyarrow, datasets, DuckDB and Polars: equal values."""

from __future__ import annotations

import pathlib

import datasets
import duckdb
import numpy as np
import polars
import pyarrow.dataset
import pytest
import truth

import stillhouse


@pytest.fixture
def rows(demo: pathlib.Path) -> list[dict[str, np.ndarray]]:
    return list(stillhouse.open(demo))


def test_pyarrow(demo: pathlib.Path, rows: list[dict[str, np.ndarray]]) -> None:
    table = pyarrow.dataset.dataset(sorted(str(f) for f in (demo / "data").glob("train-*"))).to_table()
    for row, other in zip(rows, table.to_pylist(), strict=True):
        truth.same(row, other)


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets(
    demo: pathlib.Path, rows: list[dict[str, np.ndarray]], streaming: bool, tmp_path: pathlib.Path
) -> None:
    loaded = datasets.load_dataset(str(demo), split="train", streaming=streaming, cache_dir=str(tmp_path))
    for row, other in zip(rows, loaded, strict=True):
        truth.same(row, other)
    other = datasets.load_dataset(str(demo), split="validation", streaming=streaming, cache_dir=str(tmp_path))
    assert len(list(other)) == len(stillhouse.open(demo, split="validation"))


def test_duckdb(demo: pathlib.Path, rows: list[dict[str, np.ndarray]]) -> None:
    found = duckdb.sql(f"select * from '{demo}/data/train-*.parquet' order by sequence_id").to_arrow_table()
    by_id = sorted(rows, key=lambda row: int(row["sequence_id"]))
    for row, other in zip(by_id, found.to_pylist(), strict=True):
        truth.same(row, other)


def test_polars(demo: pathlib.Path, rows: list[dict[str, np.ndarray]]) -> None:
    frame = polars.read_parquet(demo / "data" / "train-*.parquet").sort("sequence_id")
    by_id = sorted(rows, key=lambda row: int(row["sequence_id"]))
    for row, other in zip(by_id, frame.iter_rows(named=True), strict=True):
        truth.same(row, other)
