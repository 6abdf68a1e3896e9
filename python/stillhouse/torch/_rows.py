"""Single rows, or those that another sampler chose, and the function that makes a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from ..batch import Batch, Ragged
from ..info import Info


class Row(dict[str, Any]):
    """One row as tensors, by column, with the facts that a batch of such rows needs."""

    info: Info | None = None
    ragged: frozenset[str] = frozenset()
    """Columns whose rows may differ in length."""
    transform: Callable[[Batch], Any] | None = None
    state: dict[str, Any] | None = None
    """The state of the batch with which the row was read."""


class Rows(Sequence[Row]):
    """Rows that were read together: a sequence for other collate functions, a batch for :func:`collate`."""

    def __init__(self, batch: Batch, transform: Callable[[Batch], Any] | None) -> None:
        self.batch = batch
        self.transform = transform

    def __len__(self) -> int:
        return self.batch.rows

    @overload
    def __getitem__(self, row: int) -> Row: ...
    @overload
    def __getitem__(self, row: slice) -> list[Row]: ...
    def __getitem__(self, row: int | slice) -> Row | list[Row]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row: got {row}, valid: {-len(self)} to {len(self) - 1}")
        one = Row({name: column[row % len(self)] for name, column in self.batch.items()})
        one.info, one.transform, one.state = self.batch.info, self.transform, self.batch.state
        one.ragged = frozenset(name for name, column in self.batch.items() if isinstance(column, Ragged))
        return one

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(len(self)))


def collate(rows: Any) -> Any:
    """Rows of a :class:`ShardDataset` as a :class:`~stillhouse.Batch` of tensors, through the data set's ``transform``.

    Pass it as ``collate_fn`` of any loader, or as ``data_collator`` of Hugging Face's Trainer (with
    ``remove_unused_columns=False``). torch's default collate function does the same with these rows. A batch is
    returned unchanged. Raises ``TypeError`` for other rows.
    """
    if isinstance(rows, Batch):
        return rows
    if isinstance(rows, Rows):
        batch, transform = rows.batch, rows.transform
    else:
        if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, Row) for row in rows):
            got = type(rows[0]).__name__ if isinstance(rows, Sequence) and rows else type(rows).__name__
            raise TypeError(
                f"collate: got rows of type {got}, valid: rows of a stillhouse.torch.ShardDataset, unchanged (under "
                "Hugging Face's Trainer set remove_unused_columns=False: by default it removes columns)"
            )
        ragged = rows[0].ragged
        columns = {name: (_ragged if name in ragged else torch.stack)([row[name] for row in rows]) for name in rows[0]}
        batch, transform = Batch(columns, rows[0].info, rows[0].state), rows[0].transform
    return batch if transform is None else transform(batch)


def _ragged(values: list[torch.Tensor]) -> Ragged:
    lengths = torch.tensor([0, *(len(value) for value in values)])
    return Ragged(torch.cat(values), lengths.cumsum(0))


def _default_collate(rows: Any, *, collate_fn_map: Mapping[Any, Any] | None = None) -> Any:
    return collate(rows)


def _refuse_batches(batches: Any, *, collate_fn_map: Mapping[Any, Any] | None = None) -> Any:
    raise TypeError(
        f"got {len(batches)} batches of a stillhouse data set to combine into one, but the data set gives whole batches. "
        "Use stillhouse.torch.DataLoader(dataset), or batch_size=None"
    )


# how the default collate function of torch finds a type: https://docs.pytorch.org/docs/stable/data.html
default_collate_fn_map[Row] = _default_collate
default_collate_fn_map[Batch] = _refuse_batches
