"""Several data sets as one, in given proportions."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..batch import Batch
from ..dataset import Dataset, opened
from ._interleave import largest_remainder
from ._mixture import Mixture
from .streaming import StreamingShardDataset


class MixtureDataset(StreamingShardDataset):
    """A mixture of data sets: whole batches with rows of each, in given proportions, for the loaders of :class:`StreamingShardDataset`.

    ::

        st.MixtureDataset({"web": "s3://shards/web", "code": "s3://shards/code"}, batch_size=32, weights={"web": 0.7, "code": 0.3})

    ``datasets`` gives a name to each URL, folder or open data set. One of these says how many rows of each an epoch of the mixture has:

    - ``weights``: shares of the rows (which are shares of the tokens too, where rows have one length), of any scale. An epoch has
      ``rows_per_epoch`` rows, by default as many as all data sets together.
    - ``tokens``: tokens of each, to the nearest row. (Where rows differ in length: going by the mean of the data set, without padding.)
    - ``epochs``: how often each data set comes, such as ``{"web": 1, "code": 2.5}``. Without any of the three: each once.

    Each data set is shuffled by itself, with ``shuffle_blocks`` of its own; where its epoch ends within the mixture, its next one begins, in a new order. An epoch
    of the mixture takes up each data set where the one before left it: after two epochs of ``code: 2.5`` every row of it was there five times.

    The order of an epoch depends on the data sets, their rows per epoch, the seed and the epoch; ranks, workers, ``drop_last``, states and ``len`` are as of
    :class:`StreamingShardDataset`. A state goes on with the same proportions only (else ``ValueError``). Rows of the data sets are mixed as evenly as
    :mod:`stillhouse.torch._interleave` says: before any position, a data set is less than 64 · (2 + log2 of their number) rows off its share, and at the end of the epoch exact.

    A batch has two more columns: ``source`` int64 [B], the number of the data set in the order of ``datasets`` (``names``), and ``source_repeat`` int64 [B],
    how often that data set came round in this epoch, from 0. ``sequence_id`` is the data set's own, so that two rows of a
    batch may have the same: views key what they draw by data set and round as well, and noise is replayed row by row with the seed of its
    data set. :func:`stillhouse.by_source` takes a batch apart.

    ``cache_megabytes`` is shared equally among the data sets given by URL; each holds a shuffle buffer of its own. An open data set keeps the
    cache it has. Raises ``ValueError`` where data sets have different columns, types, shapes, tokenizers or facts: the message names both.
    """

    dataset: Mixture

    def __init__(
        self,
        datasets: Mapping[str, Dataset | str | os.PathLike[str]],
        *,
        batch_size: int,
        weights: Mapping[str, float] | None = None,
        tokens: Mapping[str, float] | None = None,
        epochs: Mapping[str, float] | None = None,
        rows_per_epoch: int | None = None,
        split: str = "train",
        columns: Sequence[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        shuffle_blocks: int = 128,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool | None = None,
        transform: Callable[[Batch], Any] | None = None,
        storage: Mapping[str, Any] | None = None,
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_gigabytes: float | None = None,
        cache_megabytes: int = 512,
    ) -> None:
        if not isinstance(datasets, Mapping) or not 1 <= len(datasets) <= 256:
            got = f"{len(datasets)}" if isinstance(datasets, Mapping) else type(datasets).__name__
            raise ValueError(f"datasets: got {got}, valid: a dictionary of 1 to 256 names and data sets")
        each = max(1, cache_megabytes // len(datasets))
        sources = {
            name: opened(
                dataset,
                split=split,
                columns=columns,
                storage=storage,
                cache_megabytes=each,
                disk_cache=disk_cache,
                disk_cache_gigabytes=disk_cache_gigabytes,
            )
            for name, dataset in datasets.items()
        }
        rows = _rows_per_epoch(sources, weights, tokens, epochs, rows_per_epoch)
        super().__init__(
            Mixture(sources, rows),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            shuffle_blocks=shuffle_blocks,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            transform=transform,
        )

    @property
    def names(self) -> list[str]:
        """Names of the data sets, in the order of the numbers in the column ``source``."""
        return list(self.dataset.sources)

    @property
    def rows_per_epoch(self) -> dict[str, int]:
        """Rows of each data set in an epoch of the mixture."""
        return dict(self.dataset.rows)


def _rows_per_epoch(
    sources: Mapping[str, Dataset],
    weights: Mapping[str, float] | None,
    tokens: Mapping[str, float] | None,
    epochs: Mapping[str, float] | None,
    rows_per_epoch: int | None,
) -> dict[str, int]:
    given = {"weights": weights, "tokens": tokens, "epochs": epochs}
    kinds = [kind for kind, value in given.items() if value is not None]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)}: got {len(kinds)} of them, valid: one of weights, tokens and epochs")
    kind = kinds[0] if kinds else "epochs"
    asked = given[kind] or dict.fromkeys(sources, 1.0)
    if asked.keys() != sources.keys():
        raise ValueError(f"{kind}: got {', '.join(asked)}, valid: one number each for {', '.join(sources)}")
    for name, value in asked.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{kind}: got {value} for {name}, valid: more than 0 (leave out what is not to be read)")
    for name, source in sources.items():
        if not len(source):
            raise ValueError(f"{name}: {source.url} ({source.split}) has no rows")
    if rows_per_epoch is not None and (kind != "weights" or rows_per_epoch < 1):
        raise ValueError(f"rows_per_epoch: got {rows_per_epoch} with {kind}, valid: 1 or more, with weights alone")
    if kind == "weights":
        total = rows_per_epoch or sum(map(len, sources.values()))
        rows = dict(zip(sources, largest_remainder(total, [asked[name] for name in sources])))
    elif kind == "tokens":
        rows = {name: round(asked[name] / _tokens_per_row(source)) for name, source in sources.items()}
    else:
        rows = {name: round(asked[name] * len(source)) for name, source in sources.items()}
    for name, count in rows.items():
        if count < 1:
            raise ValueError(
                f"{kind}: got {asked[name]} for {name}, which is no row of an epoch; valid: at least one row"
            )
    return rows


def _tokens_per_row(source: Dataset) -> float:
    total = source.manifest["totals"][source.split]
    return float(total["tokens"] / total["rows"])
