"""Opening a data set and reading any of its rows."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, overload

import numpy as np
import numpy.typing as npt

from . import _core
from .batch import Batch, NumpyArray, Ragged
from .info import PERMUTATION, Info

_DTYPES = {"float16": np.float16, "float32": np.float32, "bool": np.bool_}


DISK_CACHE_GIGABYTES = 100.0
"""Bound of a disk cache where nobody says another."""


@dataclass(frozen=True)
class ColumnInfo:
    """Type of a column's values and its shape per row: ``()`` for a number, ``None`` where rows differ in length."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None


class OpenOptions(TypedDict, total=False):
    """Optional arguments of :func:`open`."""

    split: str
    columns: Sequence[str] | None
    storage: Mapping[str, Any] | None
    disk_cache: str | os.PathLike[str] | None
    disk_cache_gigabytes: float | None
    cache_megabytes: int


class Dataset:
    """One split of a finished data set: rows by number, as numpy arrays.

    ``ds[i]`` is a row (a dictionary of arrays), ``ds[a:b]`` and ``ds[[3, 1, 2]]`` are a :class:`~stillhouse.Batch`.
    Rows are numbered from 0 in the order of the shards. Reading lets go of the interpreter's lock, and the object may be used from
    several threads, pickled, and carried into forked or spawned workers, where it opens its files again.

    Cost: a row that is read alone costs the pages of Parquet that hold it (8,192 tokens of every column); rows next to each other
    are read block by block (65,536 tokens) and kept within ``cache_megabytes``. With ``disk_cache`` the shards of a store come over the
    network once per machine, see :func:`open`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        split: str = "train",
        columns: Sequence[str] | None = None,
        storage: Mapping[str, Any] | None = None,
        cache_megabytes: int = 512,
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_gigabytes: float | None = None,
    ) -> None:
        folder, gigabytes = _disk_cache(disk_cache, disk_cache_gigabytes)
        self._arguments: dict[str, Any] = {
            "url": _absolute(os.fspath(url)),
            "split": split,
            "columns": None if columns is None else _names(columns),
            "storage": None if storage is None else dict(storage),
            "cache_megabytes": cache_megabytes,
            "disk_cache": folder,
            "disk_cache_gigabytes": gigabytes,
        }
        if cache_megabytes < 1:
            raise ValueError(f"cache_megabytes: got {cache_megabytes}, valid: 1 or more")
        core = _core.DataSet.open(
            self._arguments["url"],
            split,
            json.dumps(self._arguments["storage"] or {}),
            cache_megabytes * 1_000_000,
            (folder, int(gigabytes * 1e9)) if folder else None,
        )
        self._core = core if columns is None else core.select_columns(self._arguments["columns"])
        self._set_facts()

    def _set_facts(self) -> None:
        self.manifest: dict[str, Any] = json.loads(self._core.manifest)
        numbers = None
        if PERMUTATION in (self.manifest.get("beside") or {}):
            numbers = np.load(io.BytesIO(self.file(PERMUTATION)), allow_pickle=False)
        self.info = Info.of_manifest(self.manifest, numbers)
        self.columns = {
            name: ColumnInfo(np.dtype(_DTYPES.get(item, item)), None if shape is None else tuple(shape))
            for name, item, shape in self._core.columns
        }

    def file(self, name: str) -> bytes:
        """A file beside the shards, compared with its sha256 in the manifest: ``tokenizer.json``, and those that ``manifest["beside"]`` names, such as ``filter_table.npy``."""
        return self._core.beside(name)

    @property
    def url(self) -> str:
        """Where it lies, as it was given."""
        url: str = self._arguments["url"]
        return url

    @property
    def split(self) -> str:
        """Which split: ``train``, ``validation``."""
        split: str = self._arguments["split"]
        return split

    def __len__(self) -> int:
        """Rows."""
        return self._core.rows

    @overload
    def __getitem__(self, rows: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, rows: slice | Sequence[int] | npt.NDArray[np.integer[Any]]) -> Batch[NumpyArray]: ...
    def __getitem__(
        self, rows: int | slice | Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> dict[str, Any] | Batch[NumpyArray]:
        """A row, or several as a batch; negative numbers count from the end."""
        if isinstance(rows, (int, np.integer)):
            batch = self.read(np.asarray([rows]))
            return {name: column[0] for name, column in batch.items()}
        if isinstance(rows, slice):
            return self.read(np.arange(*rows.indices(len(self))))
        return self.read(np.asarray(rows))

    def read(self, rows: npt.NDArray[Any], whole_blocks: bool = False) -> Batch[NumpyArray]:
        """Rows by their numbers [B], in that order; a number may come more than once.

        ``whole_blocks`` tells that most of their neighbours will be asked for soon.
        """
        if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
            raise TypeError(f"row numbers: got {rows.dtype} of shape {rows.shape}, valid: integers of shape (B,)")
        count = len(self)
        if rows.dtype == np.uint64 and rows.size and rows.max() >= count:
            raise IndexError(f"row {rows.max()} of {self.url} ({self.split}), which has {count} rows")
        numbers = rows.astype(np.int64)
        wrong = numbers[(numbers < -count) | (numbers >= count)]
        if wrong.size:
            raise IndexError(f"row {wrong[0]} of {self.url} ({self.split}), which has {count} rows")
        numbers[numbers < 0] += count
        return self._batch(self._core.read(numbers.view(np.uint64), whole_blocks))

    def _batch(self, columns: Any, state: dict[str, Any] | None = None) -> Batch[NumpyArray]:
        made = {name: values if offsets is None else Ragged(values, offsets) for name, values, offsets in columns}
        return Batch(made, self.info, state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Rows in order."""
        for batch in self.batches(32):
            for i in range(batch.rows):
                yield {name: column[i] for name, column in batch.items()}

    def batches(self, batch_size: int) -> Iterator[Batch[NumpyArray]]:
        """Rows in order, ``batch_size`` at a time, read ahead; the last batch may be shorter."""
        steps = self._core.steps(
            epoch=0, seed=None, window_blocks=1, start=0, rank=0, world=1, batch_rows=batch_size, drop_last=False,
            worker=0, workers=1,
        )  # fmt: skip
        for columns, _ in steps.stream():
            yield self._batch(columns)

    def select_columns(self, columns: Sequence[str]) -> Dataset:
        """The same data set with some of its columns: the others are not read at all."""
        return Dataset(**{**self._arguments, "columns": _names(columns)})

    def verify(self) -> None:
        """Checks size and sha256 of every shard of the split, reading all of it.

        Raises :class:`~stillhouse.DatasetError` with the first shard that is wrong. (``stillhouse verify`` of the command line also
        checks what the shards hold.)
        """
        self._core.verify()

    def __repr__(self) -> str:
        return f"stillhouse.open({self.url!r}, split={self.split!r}): {len(self):,} rows of {', '.join(self.columns)}"

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        Dataset.__init__(self, **state)


def opened(
    dataset: Dataset | str | os.PathLike[str],
    *,
    split: str = "train",
    columns: Sequence[str] | None = None,
    storage: Mapping[str, Any] | None = None,
    cache_megabytes: int = 512,
    disk_cache: str | os.PathLike[str] | None = None,
    disk_cache_gigabytes: float | None = None,
) -> Dataset:
    """An open data set as it is, or the one at a URL with these options. Raises ``ValueError`` for an open one with options."""
    if not isinstance(dataset, Dataset):
        return Dataset(
            dataset,
            split=split,
            columns=columns,
            storage=storage,
            cache_megabytes=cache_megabytes,
            disk_cache=disk_cache,
            disk_cache_gigabytes=disk_cache_gigabytes,
        )
    if (split, columns, storage, disk_cache, disk_cache_gigabytes) != ("train", None, None, None, None):
        raise ValueError(
            f"split, columns, storage and disk_cache belong to stillhouse.open when an open data set is given: {dataset.url}"
        )
    return dataset


def _absolute(url: str) -> str:
    """A path that stays the same when the process changes its folder, or another one takes over; URLs as they are."""
    path = url.removeprefix("file://")
    return url if "://" in path else os.path.abspath(path)


def _disk_cache(folder: str | os.PathLike[str] | None, gigabytes: float | None) -> tuple[str, float]:
    """The folder of the cache ("" for none) and its bound, from the arguments or else the environment."""
    if folder is None:
        folder = os.environ.get("STILLHOUSE_DISK_CACHE", "")
    name = "disk_cache_gigabytes"
    value: Any = gigabytes
    if value is None:
        name = "STILLHOUSE_DISK_CACHE_GIGABYTES"
        value = os.environ.get(name) or DISK_CACHE_GIGABYTES
    try:
        bound = float(value)
    except (TypeError, ValueError):
        bound = math.nan
    if not (1e-9 <= bound <= 1e9):
        raise ValueError(f"{name}: got {value!r}, valid: a number of gigabytes (10^9 bytes) above 0, up to 10^9")
    path = os.fspath(folder)
    return (os.path.abspath(os.path.expanduser(path)) if path else ""), bound


def _names(columns: Sequence[str]) -> list[str]:
    if isinstance(columns, str):
        raise TypeError(f"columns: got the string {columns!r}, valid: a list of names")
    return list(columns)


def open(
    url: str | os.PathLike[str],
    *,
    split: str = "train",
    columns: Sequence[str] | None = None,
    storage: Mapping[str, Any] | None = None,
    cache_megabytes: int = 512,
    disk_cache: str | os.PathLike[str] | None = None,
    disk_cache_gigabytes: float | None = None,
) -> Dataset:
    """Opens a finished data set: a folder, or a URL of an object store (``s3://``, ``gs://``, ``az://``) or web server.

    Credentials come from the environment, the AWS profile files or the machine, as for the ``stillhouse`` program; never from the
    URL. ``storage`` is the ``storage`` section of a job file, such as ``{"endpoint": "http://minio:9000", "anonymous": True}``.
    ``columns`` leaves the others unread. ``cache_megabytes`` bounds the decoded rows that a process keeps (the footers of shards
    take up to 256 MiB more in data sets of hundreds of shards).

    ``disk_cache`` is a folder of a local disk where what is read of the shards of a store is kept (data sets in folders are read
    as they are), shared by all processes of this user and machine: ranks and workers fetch nothing twice, and a later epoch or job
    only asks which version each shard has. ``disk_cache_gigabytes`` (10^9 bytes) is the bound of the whole folder; give all processes
    the same. When it is reached, data sets that no process has open go, the least recently used shard first; what finds no room then is
    fetched each time. Defaults: the variables ``STILLHOUSE_DISK_CACHE`` (none; ``""`` here switches it off) and
    ``STILLHOUSE_DISK_CACHE_GIGABYTES`` (100). A shard that was replaced in the store is fetched anew, and so is what was damaged on
    the disk. If the disk fails or is full, reading goes on without it and warns once (``RuntimeWarning``).

    Raises :class:`~stillhouse.DatasetError` where there is no finished data set of a format that this version reads,
    :class:`~stillhouse.StoreError` where a store refuses, ``ValueError`` for a split or option that does not exist, or a
    ``disk_cache`` that cannot be written.
    """
    return Dataset(
        url,
        split=split,
        columns=columns,
        storage=storage,
        cache_megabytes=cache_megabytes,
        disk_cache=disk_cache,
        disk_cache_gigabytes=disk_cache_gigabytes,
    )
