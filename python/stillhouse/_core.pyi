"""The Rust core; see python/src."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__version__: str

# (name, values, offsets or None) of each column
_Columns: TypeAlias = list[tuple[str, npt.NDArray[Any], npt.NDArray[np.int64] | None]]

class DataSet:
    rows: int
    block_rows: int
    job_hash: str
    manifest: str
    columns: list[tuple[str, str, list[int] | None]]
    @staticmethod
    def open(
        url: str, split: str, storage: str, cache_bytes: int, disk_cache: tuple[str, int] | None = None
    ) -> DataSet: ...
    def beside(self, name: str) -> bytes: ...
    def select_columns(self, names: list[str]) -> DataSet: ...
    def read(self, rows: npt.NDArray[np.uint64], whole_blocks: bool) -> _Columns: ...
    def verify(self) -> None: ...
    def steps(
        self,
        *,
        epoch: int,
        seed: int | None,
        window_blocks: int,
        start: int,
        rank: int,
        world: int,
        batch_rows: int,
        drop_last: bool,
        worker: int,
        workers: int,
    ) -> Steps: ...

class Steps(Iterator[tuple[npt.NDArray[np.uint64], int]]):
    own_batches: int
    own_rows: int
    def __next__(self) -> tuple[npt.NDArray[np.uint64], int]: ...
    def stream(self) -> Stream: ...

class Stream(Iterator[tuple[_Columns, int]]):
    def __next__(self) -> tuple[_Columns, int]: ...

def replay(
    columns: dict[str, npt.NDArray[Any]],
    shape: tuple[int, int, int],
    tokens: npt.NDArray[Any] | None,
    request: dict[str, Any],
    out: npt.NDArray[Any],
) -> None: ...
def replay_dense(
    noise: npt.NDArray[Any],
    shape: tuple[int, int, int],
    tokens: npt.NDArray[Any] | None,
    request: dict[str, Any],
    out: npt.NDArray[Any],
) -> None: ...
def prior(
    sequence_ids: npt.NDArray[Any], positions: npt.NDArray[Any], request: dict[str, Any], out: npt.NDArray[Any]
) -> None: ...
