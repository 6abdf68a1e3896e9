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
from ._order import Order, Share, steps_of
from .batch import Batch, NumpyArray, Ragged
from .info import PERMUTATION, Info

_DTYPES = {"float16": np.float16, "float32": np.float32, "bool": np.bool_}


DISK_CACHE_GIGABYTES = 100.0
"""Default size limit of a disk cache."""


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
    Rows are numbered from 0 in the order of the shards. Reading releases the interpreter's lock. The object may be used
    from several threads, pickled, and carried into forked or spawned workers, where it opens its files again.

    Cost: a single row costs the Parquet pages that hold it (8,192 tokens of every column). Adjacent rows are read block
    by block (65,536 tokens), and ``cache_megabytes`` limits the blocks kept. With ``disk_cache``, each machine fetches
    the shards of a store once; see :func:`open`.
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
        """A file beside the shards, checked against its sha256 in the manifest.

        It is ``tokenizer.json`` or a file that ``manifest["beside"]`` names, such as ``filter_table.npy``.
        """
        return self._core.beside(name)

    @property
    def url(self) -> str:
        """The URL of the data set; a path is absolute."""
        url: str = self._arguments["url"]
        return url

    @property
    def split(self) -> str:
        """The split: ``train``, ``validation``."""
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

        Set ``whole_blocks`` if most of their neighbours will be read soon.
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
        """Rows in order, ``batch_size`` at a time, read ahead. The last batch may be shorter."""
        in_order = Order(shuffle=False, seed=0, shuffle_blocks=1)
        for columns, _ in steps_of(self, in_order, Share(batch_size), epoch=0).stream():
            yield self._batch(columns)

    def select_columns(self, columns: Sequence[str]) -> Dataset:
        """The same data set with some of its columns. The others are never read."""
        return Dataset(**{**self._arguments, "columns": _names(columns)})

    def verify(self) -> None:
        """Checks size and sha256 of every shard of the split, reading all of it.

        Raises :class:`~stillhouse.DatasetError` for the first wrong shard. (The command ``stillhouse verify`` also
        checks the contents of the shards.)
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
    """Opens a URL or folder; returns an open data set as it is, and raises ``ValueError`` if options come with it."""
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
            f"split, columns, storage and disk_cache belong to stillhouse.open when the data set is open: {dataset.url}"
        )
    return dataset


def _absolute(url: str) -> str:
    """An absolute path, which stays valid when the working folder changes or in another process; URLs unchanged."""
    path = url.removeprefix("file://")
    return url if "://" in path else os.path.abspath(path)


def _disk_cache(folder: str | os.PathLike[str] | None, gigabytes: float | None) -> tuple[str, float]:
    """The folder of the cache ("" for none) and its size limit, from the arguments or else the environment."""
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
    """Opens a finished data set in a folder, on a web server, in an object store (``s3://``, ``gs://``, ``az://``) or on the
    Hugging Face hub (``hf://datasets/org/name``).

    - ``columns`` names the columns to read; the others are never read.
    - ``storage`` is the ``storage`` section of a job file: ``{"endpoint": "http://minio:9000", "anonymous": True}``.
      Credentials come from the environment, the AWS profile files or the machine, as for the ``stillhouse`` program;
      never from the URL.
    - ``cache_megabytes`` limits the decoded rows that a process keeps. (The footers of shards take up to 256 MiB more
      in data sets of hundreds of shards.)
    - ``disk_cache`` is a folder on a local disk that keeps the parts of shards that were read from a store. (Data sets
      in folders need none.) The default is the variable ``STILLHOUSE_DISK_CACHE``, or none; ``""`` switches it off.
    - ``disk_cache_gigabytes`` (10^9 bytes) limits the whole folder; give all processes the same. The default is the
      variable ``STILLHOUSE_DISK_CACHE_GIGABYTES``, or 100.

    All processes of this user and machine share the disk cache. Ranks and workers fetch nothing twice, and a later
    epoch or job only asks the store for the version of each shard. At the limit, shards of data sets that no process
    has open are deleted, the least recently used first; parts that still do not fit are fetched each time.

    A shard that was replaced in the store, or damaged on the disk, is fetched again. If the disk fails or is full,
    reading continues without the cache and warns once (``RuntimeWarning``).

    Raises:

    - :class:`~stillhouse.DatasetError` where there is no finished data set of a format that this version reads.
    - :class:`~stillhouse.StoreError` where a store refuses.
    - ``ValueError`` for an unknown split or option, or a ``disk_cache`` that cannot be written.
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
