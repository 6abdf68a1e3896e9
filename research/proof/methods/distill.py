"""Token-level distillation from the top k of the shards, beside MDLM without a teacher and MDLM with replayed noise.

    python distill.py --work /tmp/methods --program stillhouse --json methods-distill.json

::

    mdlm    −ln q(x)                                       of the text's token
    topk    −Σ p_j ln q_j − (1 − Σ p_j) ln(1 − Σ q_j)      over the teacher's k likeliest, and the rest as one
    noise   −ln q(x | ξ)                                   with the blueprint of the shards at the masked tokens

All weighted by w(t). `validation` is MDLM's bound on −ln p(x) in nats per token, for `noise` with noise of the prior (a bound by Jensen's inequality); `conditional` is
what `noise` loses with the text's own noise.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import common
import torch
import torch.nn.functional as F
from bd3lm import prior
from common import NOISE, Judge, Masked, Results
from torch import Tensor

from stillhouse.views import mdlm

COLUMNS = {
    "mdlm": ["sequence_id", "input_ids"],
    "topk": ["sequence_id", "input_ids", "topk_index", "topk_logprob"],
    "noise": ["sequence_id", "input_ids", *NOISE],
}
PASSES = (1, 4, 8, 16, 32)


def of_topk(logits: Tensor, index: Tensor, logprob: Tensor) -> Tensor:
    """Cross-entropy [n] with the k likeliest of the teacher [n, k], and with the rest as one more outcome."""
    q = logits.log_softmax(-1).gather(1, index.long())
    rest, q_rest = (1 - part.exp().sum(1) for part in (logprob, q))
    return -(logprob.exp() * q).sum(1) - rest.clamp(min=0) * q_rest.clamp(min=1e-6).log()


def student(args: argparse.Namespace, name: str, seed: int, judge: Judge) -> dict[str, Any]:
    folder = common.noise_job(args, topk=args.topk)
    never, tokens = common.first_of(args.length), args.length - 1
    torch.manual_seed(seed)
    model = Masked(args, noise=name == "noise")

    def example_of(batch: Any, at: int, epoch: int | None = None) -> Any:
        return mdlm.mask(batch, seed=at, epoch=epoch, mask_id=args.vocab, never=never)

    def bound(example: Any, xi: Tensor | None) -> Tensor:
        logits = model(example.input_ids, example.targets, xi)
        each = F.cross_entropy(logits, example.target_ids(), reduction="none")
        return (example.target_weights() * each).sum()

    def loss(step: int, batch: Any) -> Tensor:
        example, size = example_of(batch, seed), tokens * batch.rows
        if name == "topk":
            logits = model(example.input_ids, example.targets)
            each = of_topk(logits, *(batch[column][example.targets] for column in ("topk_index", "topk_logprob")))
            return (example.target_weights() * each).sum() / size
        return bound(example, example.noise(out="softmax", threads=1) if name == "noise" else None) / size

    curve = common.fit(model, common.batches(folder, COLUMNS[name], args.batch_size, seed), loss, args.steps, args.lr)
    sums: dict[str, float] = {}
    rows = 0
    with torch.no_grad():
        for batch in common.validation(folder, args.rows, COLUMNS[name]):
            for draw in range(4):
                example = example_of(batch, 1, draw)
                shown: dict[str, Tensor | None] = {"validation": None}
                if name == "noise":
                    shown = {
                        "validation": prior(example, args.vocab),
                        "conditional": example.noise(out="softmax", threads=1),
                    }
                for kind, xi in shown.items():
                    sums[kind] = sums.get(kind, 0.0) + bound(example, xi).item() / (4 * tokens)
            rows += batch.rows
    texts = {passes: judge(common.generate(model, args, args.texts, passes, 7 + seed)) for passes in PASSES}
    return {kind: of / rows for kind, of in sums.items()} | {"written": texts, "curve": curve}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser_of(__doc__ or "", steps=600)
    parser.add_argument("--texts", type=int, default=64, help="rows that each student writes")
    parser.add_argument("--topk", type=int, default=16, help="k")
    args = common.arguments(parser, argv)
    results = Results(args, "distill", texts=args.texts, topk=args.topk)
    judge = Judge(common.teacher(args))
    held_out = [
        batch["input_ids"]
        for batch in common.validation(common.noise_job(args, topk=args.topk), args.rows, COLUMNS["mdlm"])
    ]
    results.set("corpus", judge(torch.cat(held_out).long()))
    for seed in range(args.seeds):
        for name in COLUMNS:
            if results.lack(name, seed):
                began = time.monotonic()
                results.add(name, seed, began, **student(args, name, seed, judge))


if __name__ == "__main__":
    main()
