"""What a data set holds, read by pyarrow alone."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def table(dataset: pathlib.Path, split: str = "train") -> pa.Table:
    files = sorted((dataset / "data").glob(f"{split}-*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files])


def flat(value: Any) -> np.ndarray:
    return np.asarray(value).reshape(-1)


def same(row: dict[str, Any], expected: dict[str, Any]) -> None:
    """A row of ours against one of pyarrow, where lists are flat."""
    assert set(row) == set(expected)
    for name, value in expected.items():
        got = flat(row[name])
        want = np.asarray(value, dtype=got.dtype).reshape(-1)
        np.testing.assert_array_equal(got, want, err_msg=name)
