"""Several data sets as one, in given proportions."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._epochs_base import State
from ..dataset import Dataset, OpenOptions, opened
from ._interleave import largest_remainder
from ._mixture import MixedSteps, Mixture
from .streaming import StreamingShardDataset

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._epochs import EpochOptions


class MixtureDataset(StreamingShardDataset):
    """A mixture of data sets in given proportions: whole batches with rows of each.

    ::

        datasets = {"web": "s3://shards/web", "code": "s3://shards/code"}
        ds = st.MixtureDataset(datasets, batch_size=32, weights={"web": 0.7, "code": 0.3})

    ``datasets`` gives a name to each URL, folder or open data set. One of these says how many rows of each an epoch of
    the mixture has:

    - ``weights``: shares of the rows (and of the tokens, where rows have one length), on any scale. An epoch has
      ``rows_per_epoch`` rows, by default as many as all data sets together.
    - ``tokens``: tokens of each data set, to the nearest row. Where rows differ in length, the mean length without
      padding counts.
    - ``epochs``: how often each data set comes, such as ``{"web": 1, "code": 2.5}``. Without any of the three: each
      once.

    Each data set has its own shuffle with ``shuffle_blocks``. Where its epoch ends within the mixture, its next one
    begins, in a new order. An epoch of the mixture goes on in each data set where the previous one stopped: after two
    epochs of ``code: 2.5``, every row of ``code`` came five times.

    The order of an epoch depends on the data sets, their rows per epoch, the seed and the epoch. Ranks, workers,
    ``drop_last``, ``len`` and the other options are those of :class:`StreamingShardDataset`. A state loads only with
    the same data sets and proportions (else ``ValueError``).

    :mod:`stillhouse.torch._interleave` mixes the rows evenly: before any position, a data set is less than
    64 · (2 + log2 of their number) rows off its share. At the end of the epoch the counts are exact.

    A batch has two more columns:

    - ``source`` int64 [B]: the number of the data set, in the order of ``datasets`` (see ``names``).
    - ``source_repeat`` int64 [B]: how often that data set has started again in this epoch, from 0.

    ``sequence_id`` is that of the data set, so two rows of a batch may have the same. Views therefore key their random
    choices by data set and round as well, and replay the noise of each row with the seed of its data set.
    :func:`stillhouse.by_source` splits a batch by data set.

    The data sets given by URL share ``cache_megabytes`` equally, and each holds a shuffle buffer. An open data set
    keeps its cache. Raises ``ValueError`` where data sets have different columns, types, shapes, tokenizers or facts;
    the message names both.
    """

    dataset: Mixture  # type: ignore[assignment]  # it has `url`, `split` and a length as well

    def __init__(
        self,
        datasets: Mapping[str, Dataset | str | os.PathLike[str]],
        *,
        batch_size: int,
        weights: Mapping[str, float] | None = None,
        tokens: Mapping[str, float] | None = None,
        epochs: Mapping[str, float] | None = None,
        rows_per_epoch: int | None = None,
        **options: Unpack[EpochOptions],
    ) -> None:
        if not isinstance(datasets, Mapping) or not 1 <= len(datasets) <= 256:
            got = f"{len(datasets)}" if isinstance(datasets, Mapping) else type(datasets).__name__
            raise ValueError(f"datasets: got {got}, valid: a dictionary of 1 to 256 names and data sets")
        self._proportions = (weights, tokens, epochs, rows_per_epoch)
        super().__init__(datasets, batch_size=batch_size, **options)  # type: ignore[arg-type]  # `_open` takes them

    def _open(self, dataset: Any, **opening: Unpack[OpenOptions]) -> None:
        opening["cache_megabytes"] = max(1, opening.get("cache_megabytes", 512) // len(dataset))
        sources = {name: opened(source, **opening) for name, source in dataset.items()}
        self.dataset = Mixture(sources, _rows_per_epoch(sources, *self._proportions))

    def _identity(self) -> State:
        return self.dataset.identity()

    def steps(self, epoch: int, position: int, worker: int = 0, workers: int = 1) -> MixedSteps:
        """The batches of one worker from a position of an epoch on."""
        return MixedSteps(self.dataset, self._order, self._share, epoch, position, worker, workers)

    @property
    def names(self) -> list[str]:
        """Names of the data sets. Their order is that of the numbers in the column ``source``."""
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
            raise ValueError(
                f"{kind}: got {value} for {name}, valid: more than 0 (to exclude a data set, leave it out)"
            )
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
                f"{kind}: got {asked[name]} for {name}, which rounds to no row of an epoch; valid: at least one row"
            )
    return rows


def _tokens_per_row(source: Dataset) -> float:
    total = source.manifest["totals"][source.split]
    return float(total["tokens"] / total["rows"])
