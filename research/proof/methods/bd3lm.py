"""BD3-LM with blocks of 4 and 16 tokens, with and without replayed noise: the bound on −ln p, and what is written at a number of passes.

    python bd3lm.py --work /tmp/methods --program stillhouse --json methods-bd3lm.json

`4` and `16` are students without noise; `4 noise` and `16 noise` see softmax(ξ) of the shards at the masked tokens. Their loss is conditional on noise: it is not a
bound on −ln p(x), and compares only where the noise shown is the prior's. Texts are written block after block, each in so many passes of MDLM's sampler;
NFE counts the passes of all blocks.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import EOS, NOISE, TEMPERATURE, Block, Judge, Results, embedding
from torch import Tensor, nn

from stillhouse import noise
from stillhouse.views import bd3lm

COLUMNS = ["sequence_id", "input_ids", *NOISE]
PASSES = {4: (1, 2), 16: (1, 4, 8)}
"""Passes for a block, by its length."""


class Blockwise(nn.Module):
    """Logits [n, V] at the targets of the noised half of [x_t, x_0]."""

    def __init__(self, args: argparse.Namespace, size: int, with_noise: bool) -> None:
        super().__init__()
        self.length = args.length
        self.tokens, self.positions = embedding(args.vocab + 1, args.width), embedding(args.length, args.width)
        self.blueprint = nn.Linear(args.vocab, args.width, bias=False) if with_noise else None
        if self.blueprint is not None:
            nn.init.normal_(self.blueprint.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocab)
        self.register_buffer("seen", torch.from_numpy(bd3lm.block_attention(args.length, size)))

    def forward(self, both: Tensor, targets: Tensor, xi: Tensor | None) -> Tensor:
        x = self.tokens(both.long())
        noised, clean = x[:, : self.length], x[:, self.length :]
        if self.blueprint is not None:
            noised = noised.clone()
            noised[targets] = self.blueprint(xi)
        at = torch.arange(self.length).repeat(2)
        x = torch.cat([noised + self.positions.weight, clean + self.positions.weight], 1)
        for block in self.blocks:
            x = block(x, self.seen, at=at)
        return self.head(self.norm(x[:, : self.length][targets]))


def prior(example: Any, vocab: int) -> Tensor:
    """Noise that knows nothing of the tokens."""
    rows, at = example.targets.nonzero(as_tuple=True)
    made: Tensor = noise.prior(99, example.batch["sequence_id"][rows], at[:, None], vocab, threads=1)[:, 0]
    return made


def bound(model: Blockwise, example: Any, xi: Tensor | None) -> Tensor:
    logits = model(example.noised_and_clean(), example.targets, xi)
    each = F.cross_entropy(logits, example.target_ids(), reduction="none")
    return (example.target_weights() * each).sum()


@torch.no_grad()
def written(model: Blockwise, args: argparse.Namespace, size: int, passes: int, seed: int) -> Tensor:
    """Rows [texts, L], block after block; position 0 is given."""
    torch.manual_seed(seed)
    noised = torch.full((args.texts, args.length), args.vocab)
    noised[:, 0] = EOS
    xi = None
    if model.blueprint is not None:
        at = torch.arange(args.length)
        xi = noise.prior(seed, torch.arange(args.texts), at, args.vocab, temperature=TEMPERATURE, threads=1)
    for start in range(0, args.length, size):
        inside = torch.zeros(args.length, dtype=torch.bool)
        inside[start : start + size] = True
        for left in range(passes, 0, -1):
            targets = (noised == args.vocab) & inside
            if not targets.any():
                break
            logits = model(torch.cat([noised, noised], 1), targets, xi[targets] if xi is not None else None)
            drawn = noised.masked_scatter(targets, torch.multinomial(logits.softmax(-1), 1)[:, 0])
            noised = torch.where(targets & (torch.rand(noised.shape) < 1 / left), drawn, noised)
    return noised


def student(args: argparse.Namespace, size: int, with_noise: bool, seed: int, judge: Judge) -> dict[str, Any]:
    folder = common.noise_job(args, topk=args.topk)
    columns = COLUMNS if with_noise else COLUMNS[:2]
    never, tokens = common.first_of(args.length), args.length - 1
    torch.manual_seed(seed)
    model = Blockwise(args, size, with_noise)

    def example_of(batch: Any, at: int, epoch: int | None = None) -> Any:
        return bd3lm.mask(batch, block_size=size, seed=at, epoch=epoch, mask_id=args.vocab, never=never)

    def loss(step: int, batch: Any) -> Tensor:
        example = example_of(batch, seed)
        xi = example.noise(out="softmax", threads=1) if with_noise else None
        return bound(model, example, xi) / (tokens * batch.rows)

    curve = common.fit(model, common.batches(folder, columns, args.batch_size, seed), loss, args.steps, args.lr)
    sums: dict[str, float] = {}
    rows = 0
    with torch.no_grad():
        for batch in common.validation(folder, args.rows, columns):
            for draw in range(2):
                example = example_of(batch, 1, draw)
                shown = {"validation": None}
                if with_noise:
                    shown = {
                        "conditional": example.noise(out="softmax", threads=1),
                        "validation": prior(example, args.vocab),
                    }
                for name, xi in shown.items():
                    sums[name] = sums.get(name, 0.0) + bound(model, example, xi).item() / (2 * tokens)
            rows += batch.rows
        texts = {
            passes * args.length // size: judge(written(model, args, size, passes, 7 + seed)) for passes in PASSES[size]
        }
    return {name: of / rows for name, of in sums.items()} | {"written": texts, "curve": curve}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser_of(__doc__ or "", steps=600)
    parser.add_argument("--texts", type=int, default=64, help="rows that each student writes")
    parser.add_argument(
        "--topk", type=int, default=16, help="the likeliest tokens that the shards hold as well, for distill.py"
    )
    args = common.arguments(parser, argv)
    results = Results(args, "bd3lm", texts=args.texts)
    judge = Judge(common.teacher(args))
    held_out = torch.cat(
        [batch["input_ids"] for batch in common.validation(common.noise_job(args, topk=args.topk), args.rows, COLUMNS)]
    )
    results.set("corpus", judge(held_out.long()))
    for seed in range(args.seeds):
        for size in PASSES:
            for with_noise in (False, True):
                name = f"{size} noise" if with_noise else f"{size}"
                if results.lack(name, seed):
                    began = time.monotonic()
                    results.add(name, seed, began, **student(args, size, with_noise, seed, judge))


if __name__ == "__main__":
    main()
