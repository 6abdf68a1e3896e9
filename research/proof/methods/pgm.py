"""PGM against MDLM at equal steps: the validation loss per step.

    python pgm.py --work /tmp/methods --program stillhouse --json methods-pgm.json

::

    mdlm            one masked copy of a row in a step                   about half of its tokens are predicted
    complementary   both halves of a partition, as two masked copies     all are, with twice the passes
    pgm             the partition itself: encoder by groups, GroupSwap,  all are, in one pass over the row
                    decoder to the other group

All are measured by one bound on the same held-out rows, times and partitions: each group predicted from the other. Partitions come from the shards (two
views, one each in the first two epochs), later ones are drawn.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import Block, Masked, Results, embedding
from torch import Tensor, nn

from stillhouse.views import mdlm, pgm

VIEWS = 2
COLUMNS = ["sequence_id", "input_ids", "partition", "partition_t"]
STUDENTS = ("mdlm", "complementary", "pgm")


class Partition(nn.Module):
    """PGM with as many layers as MDLM, half before and half after GroupSwap, whose queries know positions alone (the paper's simpler ones)."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        half = args.layers // 2
        self.tokens, self.positions, self.queries = (
            embedding(count, args.width) for count in (args.vocab, args.length, args.length)
        )
        self.encoder = nn.ModuleList(Block(args.width) for _ in range(half))
        self.swap = Block(args.width, sink=True)
        self.decoder = nn.ModuleList(Block(args.width, sink=True) for _ in range(args.layers - half - 1))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocab)

    def forward(self, ids: Tensor, group: Tensor, swap: Tensor) -> Tensor:
        """Logits [B, L, V]: of each token from those of the other group."""
        x = self.tokens(ids.long()) + self.positions.weight[: ids.shape[1]]
        for block in self.encoder:
            x = block(x, group)
        y = self.swap(self.queries.weight[: ids.shape[1]].expand(len(ids), -1, -1), swap, x)
        for block in self.decoder:
            y = block(y, swap, x)
        return self.head(self.norm(y))


def of_partition(model: nn.Module, batch: Any, view: int | None, seed: int) -> tuple[Tensor, int]:
    example = pgm.partition(batch, view=view, seed=seed)
    group, swap = (example.attention(kind, order="position") for kind in ("group", "swap"))
    logits = model(example.input_ids, group, swap)
    each = F.cross_entropy(logits.flatten(0, 1), example.input_ids.long().flatten(), reduction="none")
    return (example.weights.flatten() * each).sum() / 2, example.input_ids.numel()


def of_halves(
    model: nn.Module, batch: Any, view: int | None, seed: int, args: argparse.Namespace
) -> tuple[Tensor, int]:
    halves = mdlm.complementary(batch, view=view, seed=seed, mask_id=args.vocab)
    both = sum(of_mask(model, half) for half in halves)
    assert isinstance(both, Tensor)
    return both / 2, batch["input_ids"].numel()


def of_mask(model: nn.Module, example: Any) -> Tensor:
    each = F.cross_entropy(model(example.input_ids, example.targets), example.target_ids(), reduction="none")
    return (example.target_weights() * each).sum()


def student(args: argparse.Namespace, name: str, seed: int) -> tuple[list[tuple[int, float]], int]:
    """The validation loss by steps, and the number of parameters."""
    folder = common.job(args, "partitions", partitions={"views": VIEWS})
    torch.manual_seed(seed)
    model: nn.Module = Partition(args) if name == "pgm" else Masked(args)
    held_out = list(common.validation(folder, args.rows, COLUMNS))

    def bound(batch: Any, view: int | None, at: int) -> tuple[Tensor, int]:
        return of_partition(model, batch, view, at) if name == "pgm" else of_halves(model, batch, view, at, args)

    def loss(step: int, batch: Any) -> Tensor:
        if name == "mdlm":
            return of_mask(model, mdlm.mask(batch, seed=seed, mask_id=args.vocab)) / batch["input_ids"].numel()
        epoch = batch.global_batch.epoch
        lost, tokens = bound(batch, epoch if epoch < VIEWS else None, seed)
        return lost / tokens

    @torch.no_grad()
    def measure() -> float:
        sums = [bound(batch, view, 1) for batch in held_out for view in range(VIEWS)]
        return sum(lost.item() for lost, _ in sums) / sum(tokens for _, tokens in sums)

    data = common.batches(folder, COLUMNS, args.batch_size, seed)
    curve = common.fit(model, data, loss, args.steps, args.lr, args.every, measure)
    return curve, sum(p.numel() for p in model.parameters())


def main(argv: list[str] | None = None) -> None:
    parser = common.parser_of(__doc__ or "", steps=600)
    parser.add_argument("--every", type=int, default=100, help="steps between measurements")
    args = common.arguments(parser, argv)
    results = Results(args, "pgm", every=args.every)
    for seed in range(args.seeds):
        for name in STUDENTS:
            if results.lack(name, seed):
                began = time.monotonic()
                curve, parameters = student(args, name, seed)
                results.add(name, seed, began, validation=curve[-1][1], curve=curve, parameters=parameters)


if __name__ == "__main__":
    main()
