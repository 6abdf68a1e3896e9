"""ARMD: left to right, progressively permuted and strided orders against MDLM at equal steps; perplexity by order, and of what is written S tokens at a time.

    python armd.py --work /tmp/methods --program stillhouse --json methods-armd.json

::

    ar            left to right in every step (ρ = 0)
    progressive   ρ tokens of a row change places; ρ grows from 1 to ρ_max between a tenth and half of the steps
    random        any order: the masking steps of a row are drawn
    … + strided   the student above, trained on for a quarter of the steps with the strided orders that the shards store, S from 1, 2, 4
    mdlm          masks instead of orders: a bound on the same −ln p

The first half of the layers has two streams (contents, and queries that know their position alone and see earlier blocks), the rest are causal over the queries.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import EOS, Block, Judge, Masked, Results, embedding
from torch import Tensor, nn

from stillhouse.views import armd, mdlm

COLUMNS = ["sequence_id", "input_ids", "order", "block"]
STREAMS = (1, 2, 4)


class Ordered(nn.Module):
    """Logits [B, L, V] of the n-th token generated, from the tokens of earlier blocks."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.two = args.layers // 2
        self.tokens, self.positions = embedding(args.vocab, args.width), embedding(args.length, args.width)
        self.query = nn.Parameter(torch.zeros(args.width))
        self.blocks = nn.ModuleList(Block(args.width, sink=True) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocab)

    def forward(self, ids: Tensor, order: Tensor, block: Tensor) -> Tensor:
        causal = block[:, None, :] <= block[:, :, None]
        strict = block[:, None, :] < block[:, :, None]
        position = self.positions(order)
        content, asked = self.tokens(ids.long()) + position, self.query + position
        for layer in self.blocks[: self.two]:
            asked, content = layer(asked, strict, content, at=order), layer(content, causal, at=order)
        for layer in self.blocks[self.two :]:
            asked = layer(asked, causal, at=order)
        return self.head(self.norm(asked))


def lost(model: nn.Module, example: Any) -> Tensor:
    """−ln p of each token behind the first position of the row, which is given."""
    logits = model(example.input_ids, example.order, example.block)
    each = F.cross_entropy(logits.flatten(0, 1), example.input_ids.long().flatten(), reduction="none")
    return each[(example.order != 0).flatten()]


@torch.no_grad()
def measured(model: nn.Module, held_out: list[Any]) -> dict[str, float]:
    """Nats per token by order."""
    model.eval()
    views: dict[str, Any] = {f"S = {s}": lambda batch, s=s: armd.strided(batch, streams=s) for s in STREAMS}
    views["random"] = lambda batch: armd.random(batch, steps=batch["input_ids"].shape[1], seed=1)
    return {
        name: torch.cat([lost(model, view(batch)) for batch in held_out]).mean().item() for name, view in views.items()
    }


@torch.no_grad()
def written(model: nn.Module, args: argparse.Namespace, streams: int, seed: int) -> Tensor:
    """Rows [rows, L], S tokens at a time; position 0 is given."""
    torch.manual_seed(seed)
    order, block = (torch.from_numpy(part) for part in armd.strided_order(args.length, streams))
    orders, blocks = (part.expand(args.texts, -1) for part in (order, block))
    ids = torch.full((args.texts, args.length), EOS)  # in the order of generation
    for number in range(2, int(block.max()) + 1):
        now = block == number
        ids[:, now] = torch.distributions.Categorical(logits=model(ids, orders, blocks)[:, now]).sample()
    rows = torch.empty_like(ids)
    rows[:, order] = ids
    return rows


def ordered(
    args: argparse.Namespace, name: str, seed: int, results: Results, held_out: list[Any], judge: Judge
) -> None:
    """A student, and the same trained on with strided orders."""
    began = time.monotonic()
    folder = common.job(args, "strided", orders={"kind": "strided", "streams": list(STREAMS)})
    schedule = armd.ProgressiveSchedule(args.steps // 10, args.steps // 2, args.rho)
    torch.manual_seed(seed)
    model = Ordered(args)

    def loss(step: int, batch: Any) -> Tensor:
        if name == "ar":
            return lost(model, armd.progressive(batch, rho=0, seed=seed)).mean()
        if name == "progressive":
            return lost(model, armd.progressive(batch, step, schedule=schedule, seed=seed)).mean()
        return lost(model, armd.random(batch, steps=args.length, seed=seed)).mean()

    def add(as_name: str, curve: list[tuple[int, float]]) -> None:
        by_order = measured(model, held_out)
        texts = {f"S = {s}": judge(written(model, args, s, 7 + seed)) for s in STREAMS}
        results.add(as_name, seed, began, validation=by_order["S = 1"], orders=by_order, written=texts, curve=curve)

    data = common.batches(folder, COLUMNS, args.batch_size, seed)
    curve = common.fit(model, data, loss, args.steps, args.lr)
    if results.lack(name, seed):
        add(name, curve)
    if name != "random":
        began, model = time.monotonic(), copy.deepcopy(model).train()
        curve = common.fit(
            model, data, lambda step, batch: lost(model, armd.stored(batch)).mean(), args.steps // 4, args.lr / 2, begun=args.steps
        )  # fmt: skip
        add(f"{name} + strided", curve)


def masked(args: argparse.Namespace, seed: int, results: Results, held_out: list[Any]) -> None:
    """MDLM's bound at the same steps."""
    began = time.monotonic()
    folder = common.job(args, "strided", orders={"kind": "strided", "streams": list(STREAMS)})
    never, tokens = common.first_of(args.length), args.length - 1
    torch.manual_seed(seed)
    model = Masked(args)

    def bound(batch: Any, at: int, epoch: int | None = None) -> Tensor:
        example = mdlm.mask(batch, seed=at, epoch=epoch, mask_id=args.vocab, never=never)
        each = F.cross_entropy(model(example.input_ids, example.targets), example.target_ids(), reduction="none")
        return (example.target_weights() * each).sum() / (tokens * batch.rows)

    data = common.batches(folder, COLUMNS, args.batch_size, seed)
    curve = common.fit(model, data, lambda step, batch: bound(batch, seed), args.steps, args.lr)
    with torch.no_grad():
        draws = [bound(batch, 1, draw).item() * batch.rows for batch in held_out for draw in range(4)]
    loss = sum(draws) / (4 * sum(batch.rows for batch in held_out))
    results.add("mdlm", seed, began, validation=loss, curve=curve)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser_of(__doc__ or "", steps=600)
    parser.add_argument("--rho", type=int, default=8, help="ρ_max")
    parser.add_argument("--texts", type=int, default=64, help="rows that each student writes")
    args = common.arguments(parser, argv)
    results = Results(args, "armd", rho=args.rho, texts=args.texts)
    judge = Judge(common.teacher(args))
    folder = common.job(args, "strided", orders={"kind": "strided", "streams": list(STREAMS)})
    held_out = list(common.validation(folder, args.rows, COLUMNS))
    results.set("corpus", judge(torch.cat([batch["input_ids"] for batch in held_out]).long()))
    for seed in range(args.seeds):
        for name in ("ar", "progressive", "random"):
            if results.lack(name, seed) or (name != "random" and results.lack(f"{name} + strided", seed)):
                ordered(args, name, seed, results, held_out, judge)
        if results.lack("mdlm", seed):
            masked(args, seed, results, held_out)


if __name__ == "__main__":
    main()
