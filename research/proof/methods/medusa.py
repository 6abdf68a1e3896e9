"""Medusa heads behind a frozen teacher, with and without replayed noise: how often what they propose is accepted.

    python medusa.py --work /tmp/methods --program stillhouse --json methods-medusa.json

::

    position   i     i + 1    i + 2    i + 3    i + 4
    token      x     head 0   head 1   head 2   head 3        head 0 is the teacher's own, the others are trained (offsets 1–3)
    noise            ξ        ξ        ξ        ξ             a causal layer over the blueprints W·softmax(ξ) up to the head's own token

The teacher is its own backbone (self-distillation). Heads are those of Medusa-1: W_2(SiLU(W_1 h) + h), W_2 as the teacher's head, W_1 = 0 at first. Accepted is a
proposal of likelihood above min(ε, δ·exp(−H)), ε = 0.1, δ = 1, under the teacher (Eq. 12), when those before it were; heads propose their likeliest token. Head 0
draws: its token is argmax(l + τ·ξ), and the heads of `noise` see that same ξ. In `greedy` the head 0 of heads without noise proposes its likeliest token instead.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import NOISE, TEMPERATURE, Block, Judge, Results
from torch import Tensor, nn

from stillhouse import noise
from stillhouse.views import medusa

COLUMNS = ["sequence_id", "input_ids", *NOISE]
HEADS = 3
EPSILON, DELTA = 0.1, 1.0


class Heads(nn.Module):
    """Logits [n, 3, V] of the tokens 2 to 4 ahead, from the backbone's state [n, H] and, with noise, from softmax(ξ) [n, 4, V] of the tokens 1 to 4 ahead."""

    def __init__(self, head: Tensor, with_noise: bool) -> None:
        super().__init__()
        vocab, width = head.shape
        self.inner = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(HEADS))
        self.outer = nn.ModuleList(nn.Linear(width, vocab, bias=False) for _ in range(HEADS))
        for inner, outer in zip(self.inner, self.outer):
            nn.init.zeros_(inner.weight)
            with torch.no_grad():
                outer.weight.copy_(head)
        self.blueprint = nn.Linear(vocab, width, bias=False) if with_noise else None
        self.positions = nn.Parameter(torch.zeros(HEADS + 1, width))
        self.mixed = nn.ModuleList(Block(width) for _ in range(2 if with_noise else 0))
        if self.blueprint is not None:
            with torch.no_grad():  # as the table of tokens, which the teacher's head is
                self.blueprint.weight.copy_(head.T)
        self.register_buffer("causal", torch.ones(HEADS + 1, HEADS + 1, dtype=torch.bool).tril())

    def forward(self, h: Tensor, xi: Tensor | None) -> Tensor:
        states = [h] * HEADS
        if self.blueprint is not None:
            x = self.blueprint(xi) + self.positions + h[:, None]
            for block in self.mixed:
                x = block(x, self.causal)
            states = [x[:, j + 1] for j in range(HEADS)]
        return torch.stack([outer(F.silu(inner(s)) + s) for inner, outer, s in zip(self.inner, self.outer, states)], 1)


def train(args: argparse.Namespace, judge: Judge, with_noise: bool, seed: int) -> tuple[Heads, list[tuple[int, float]]]:
    """The heads and their learning curve."""
    folder = common.noise_job(args, topk=args.topk)
    torch.manual_seed(seed)
    model = Heads(judge.model.lm_head.weight.detach(), with_noise)
    anchors = torch.arange(0, args.length - HEADS - 1, 3)

    def loss(step: int, batch: Any) -> Tensor:
        example = medusa.targets(batch, heads=HEADS + 1, offsets="next", anchors=anchors)
        with torch.no_grad():
            h = judge.model.transformer(batch["input_ids"].long()).last_hidden_state[:, anchors]
        xi = example.noise(out="softmax", threads=1).flatten(0, 1) if with_noise else None
        logits = model(h.flatten(0, 1), xi)
        return F.cross_entropy(logits.flatten(0, 1), example.target_ids()[:, :, 1:].flatten())

    columns = COLUMNS if with_noise else COLUMNS[:2]
    curve = common.fit(model, common.batches(folder, columns, args.batch_size, seed), loss, args.steps, args.lr)
    return model, curve


@torch.no_grad()
def acceptance(
    args: argparse.Namespace, judge: Judge, model: Heads, held_out: list[Any], greedy: bool, seed: int
) -> dict[str, Any]:
    """Proposals of each head that were verified and that were accepted."""
    verified, accepted = [0] * HEADS, [0] * HEADS
    for batch in held_out:
        ids = batch["input_ids"].long()
        states = judge.model.transformer(ids).last_hidden_state
        for anchor in range(7, args.length - HEADS - 1, 6):
            at = torch.arange(anchor + 1, anchor + HEADS + 2)
            scaled = TEMPERATURE * noise.prior(
                1000 + seed, batch["sequence_id"], at, args.vocab, out="gumbel", threads=1
            )
            h = states[:, anchor]
            logits = judge.model.lm_head(h)
            first = (logits if greedy else logits + scaled[:, 0]).argmax(1)
            proposed = model(h, scaled.softmax(-1) if model.blueprint is not None else None).argmax(2)
            whole = torch.cat([ids[:, : anchor + 1], first[:, None], proposed], 1)
            p = judge.model(whole).logits[:, anchor + 1 : -1].softmax(-1)
            bar = (DELTA * (-torch.special.entr(p).sum(-1)).exp()).clamp(max=EPSILON)
            good = p.gather(2, proposed[:, :, None])[..., 0] > bar
            alive = torch.ones(len(ids), dtype=torch.bool)
            for j in range(HEADS):
                verified[j] += int(alive.sum())
                alive &= good[:, j]
                accepted[j] += int(alive.sum())
    contexts = verified[0]
    return {
        "verified": verified, "accepted": accepted, "rates": [a / max(1, v) for a, v in zip(accepted, verified)],
        "accepted_length": 1 + sum(accepted) / contexts,
    }  # fmt: skip


@torch.no_grad()
def own_noise(args: argparse.Namespace, judge: Judge, model: Heads, held_out: list[Any]) -> list[float]:
    """How often each head's likeliest token is the text's, with the noise of the text's own tokens."""
    anchors = torch.arange(0, args.length - HEADS - 1, 3)
    right = []
    for batch in held_out:
        example = medusa.targets(batch, heads=HEADS + 1, offsets="next", anchors=anchors)
        h = judge.model.transformer(batch["input_ids"].long()).last_hidden_state[:, anchors].flatten(0, 1)
        xi = example.noise(out="softmax", threads=1).flatten(0, 1) if model.blueprint is not None else None
        right.append(model(h, xi).argmax(2) == example.target_ids()[:, :, 1:].flatten(0, 1))
    return torch.cat(right).float().mean(0).tolist()


def main(argv: list[str] | None = None) -> None:
    parser = common.parser_of(__doc__ or "", steps=600)
    parser.add_argument(
        "--topk", type=int, default=16, help="the likeliest tokens that the shards hold as well, for distill.py"
    )
    args = common.arguments(parser, argv)
    results = Results(args, "medusa", heads=HEADS)
    judge = Judge(common.teacher(args))
    held_out = list(common.validation(common.noise_job(args, topk=args.topk), args.rows, COLUMNS))
    for seed in range(args.seeds):
        for name in ("heads", "noise"):
            if results.lack(name, seed):
                began = time.monotonic()
                model, curve = train(args, judge, name == "noise", seed)
                found = {
                    "right_with_own_noise": own_noise(args, judge, model, held_out),
                    "drawn": acceptance(args, judge, model, held_out, False, seed),
                    "curve": curve,
                }
                if name == "heads":
                    found["greedy"] = acceptance(args, judge, model, held_out, True, seed)
                results.add(name, seed, began, **found)


if __name__ == "__main__":
    main()
