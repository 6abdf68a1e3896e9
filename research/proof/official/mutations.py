"""Mistakes of ours, made on purpose: a comparison that does not see the one it is about proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stillhouse import noise
from stillhouse.views import armd, bd3lm, example, mdlm, medusa, pgm, prime, schedule

from . import exports


@dataclass(frozen=True)
class Mutation:
    """A function of ours that is replaced by one made of it."""

    paper: str
    what: str
    owner: Any
    name: str
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]]

    @contextmanager
    def made(self) -> Iterator[None]:
        """While this lasts, ours is wrong."""
        right = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.wrong(right))
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)


def _scaled(by: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda right: lambda *args, **kwargs: right(*args, **kwargs) * by


def _with_own_block(length: int, size: int) -> Any:
    block = np.arange(length) // size
    query, key = block[:, None], block[None, :]
    return np.block([[query == key, query >= key], [np.zeros((length, length), bool), query >= key]])


def _of_the_position_before(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(batch: Any, positions: Any, **options: Any) -> Any:
        return right(batch, positions - 1 if positions.dtype == torch.int64 else positions, **options)

    return wrong


MUTATIONS = (
    Mutation("mdlm", "weights a thousandth too large", schedule.Schedule, "weight", _scaled(1.001)),
    Mutation("mdlm", "uniforms of masks mirrored", mdlm, "uniforms", lambda right: lambda *a, **k: 1 - right(*a, **k)),
    Mutation("bd3lm", "a block sees its own clean tokens", bd3lm, "block_attention", lambda right: _with_own_block),
    Mutation(
        "bd3lm",
        "t of the block before",
        bd3lm,
        "batch_times",
        lambda right: lambda *a, **k: np.roll(right(*a, **k), 1, 1),
    ),
    Mutation("bd3lm", "weights a thousandth too large", schedule.Schedule, "weight", _scaled(1.001)),
    Mutation("gumbel", "noise of the position before", noise, "replay", lambda right: _of_the_position_before(right)),
    Mutation(
        "gumbel",
        "noise of the target before",
        example,
        "replay",
        lambda right: lambda *a, **k: right(*a, **k).roll(1, 0),
    ),
    Mutation(
        "prime",
        "digits with the least significant first",
        prime,
        "encode",
        lambda right: (
            lambda *a, **k: (
                right(*a, **k).flip(-1) if isinstance(right(*a, **k), torch.Tensor) else right(*a, **k)[..., ::-1]
            )
        ),
    ),
    Mutation(
        "prime",
        "a valid set of the first three digits alone",
        prime,
        "valid_set",
        lambda right: lambda digits, table: right(digits, table[:3]),
    ),
    Mutation("prime", "weights a thousandth too large", schedule.Schedule, "weight", _scaled(1.001)),
    Mutation(
        "prime", "uniforms of masks mirrored", prime, "uniforms", lambda right: lambda *a, **k: 1 - right(*a, **k)
    ),
    Mutation(
        "pgm",
        "the weights of the two groups exchanged, Eq. 6 as printed",
        pgm,
        "group_weights",
        lambda right: lambda *a: right(*a)[::-1],
    ),
    Mutation("pgm", "groups exchanged", pgm, "draw_groups", lambda right: lambda *a, **k: ~right(*a, **k)),
    Mutation(
        "pgm",
        "attention to the own group for both kinds",
        pgm.PartitionExample,
        "attention",
        lambda right: lambda self, kind="group", **k: right(self, "group", **k),
    ),
    Mutation(
        "medusa",
        "heads that predict one token too far",
        medusa,
        "targets",
        lambda right: (
            lambda batch, **k: right(batch, heads=k["heads"], first=3 if k.get("offsets") == "lookahead" else 2)
        ),
    ),
    Mutation(
        "armd",
        "streams that are not interleaved",
        armd,
        "strided_order",
        lambda right: lambda n, s: (np.arange(n), right(n, s)[1]),
    ),
    Mutation(
        "armd",
        "sorted by masking step ascending",
        armd,
        "masking_steps",
        lambda right: lambda batch, tau, **k: right(batch, k["steps"] + 1 - tau, **k),
    ),
    Mutation(
        "exports",
        "log-probabilities of the position before",
        exports,
        "said",
        lambda right: lambda batch: [a.roll(1, 1) for a in right(batch)],
    ),
)
