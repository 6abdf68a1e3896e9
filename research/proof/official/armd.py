"""ARMD has no published code: what its paper prints as numbers is compared in its place."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from stillhouse import Batch
from stillhouse.views import armd

from .compare import Comparison
from .data import Data

PRINTED = [1, 5, 2, 6, 3, 7, 4, 8]
"""π of N = 8 and S = 2, §3.1; Figure 2 has heads 1 and 5 as steps 1 and 2, then a pair in every step."""
STEPS = [1, 2, 3, 3, 4, 4, 5, 5]


def comparisons(root: pathlib.Path, data: Data) -> Iterator[Comparison]:
    batch = data.plain
    first = batch["input_ids"][:, :8]
    eight = Batch({"input_ids": first, "sequence_id": batch["sequence_id"]}, info=batch.info)
    example = armd.strided(eight, streams=2)
    rows = len(first)
    yield Comparison(
        "armd: strided order",
        "π of 8 tokens in 2 streams (positions from 1, as printed)",
        None,
        "",
        "views.armd.strided(batch, streams=2).order",
        np.tile(PRINTED, (rows, 1)),
        example.order + 1,
        printed="paper, §3.1",
    )
    yield Comparison(
        "armd: strided blocks",
        "the step at which each of them is generated",
        None,
        "",
        "views.armd.strided(batch, streams=2).block",
        np.tile(STEPS, (rows, 1)),
        example.block,
        printed="paper, Figure 2",
    )
    # A forward process of T = 4 steps: π by descending τ, B(n) = T − τ(n) + 1, Eq. 5 in words of its own.
    tau = np.random.default_rng(11).integers(1, 5, (rows, 8))
    made = armd.masking_steps(eight, tau, steps=4)
    order = np.array([sorted(range(8), key=lambda i, t=t: (-t[i], i)) for t in tau])
    block = 4 - np.take_along_axis(tau, order, 1) + 1
    yield Comparison(
        "armd: order of masking steps",
        "positions by τ descending (masked last first), and their blocks",
        None,
        "",
        "views.armd.masking_steps(batch, tau, steps=4)",
        np.stack([order, block]),
        np.stack([made.order, made.block]),
        printed="paper, §2 and the notation of appendix A",
    )
    seen = np.array([[[b[i] < b[n] for i in range(8)] for n in range(8)] for b in block])
    yield Comparison(
        "armd: strictly causal attention",
        "token n sees the blocks before its own",
        None,
        "",
        "views.armd.masking_steps(batch, tau, steps=4).strictly_causal()",
        seen,
        made.strictly_causal(),
        printed="paper, Eq. 5",
    )
