"""MDM-Prime: tokens as ℓ = 1, 2, 4 digits that are masked one by one, on text and on images; the paper's loss, and a bound on −ln p of a token.

    python prime.py --work /tmp/methods --program stillhouse --json methods-prime.json

The loss is Eq. 5: at a time t each token with a masked digit costs −ln p(y_0^i | y_t) / t, of all its masked digits jointly. That is no bound on −ln p for ℓ > 1: a reverse step
unmasks one digit, and costs −ln of that digit's own probability, so that the bound is

    ∫ 1/t Σ_i Σ_{j masked} −ln p(y_0^{i,j} | y_t) dt

with the margins of the same p. Where the digits of a token tell of each other Eq. 5 is below it, and below the entropy for a perfect p (``of_the_perfect``). Both are measured.

Images are scikit-learn's handwritten digits: 1,797 of 8 × 8 pixels, of which 16 grey levels are used (its 17th, 16, counts as 15). ℓ = 1 is MDLM. Embeddings of the
digits of a token are joined to one of the model's width, and p is 0 where a token does not agree with the digits that are seen (carry-over), as in the paper.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib
import time
from typing import Any

import common
import numpy as np
import torch
import torch.nn.functional as F
from common import Block, Results, embedding
from torch import Tensor, nn

from stillhouse.views import prime

LENGTHS = (1, 2, 4)
COLUMNS = ["sequence_id", "input_ids"]
LEVELS, PIXELS, HELD_OUT = 16, 64, 256


class Digits(nn.Module):
    """Tokens [n, C] at the targets, from digits that are partly masked."""

    def __init__(self, args: argparse.Namespace, vocab: int, length: int, digits: int) -> None:
        super().__init__()
        base = prime.base_of(vocab, digits)
        self.tables = nn.ModuleList(embedding(base + 1, args.width // digits) for _ in range(digits))
        self.positions = embedding(length, args.width)
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, vocab)
        self.register_buffer("filter", torch.from_numpy(prime.filter_table(vocab, digits)))
        written = prime.encode(torch.arange(vocab), base, digits)
        self.register_buffer("digits", F.one_hot(written.long(), base).double())

    def forward(self, masked: Tensor, targets: Tensor) -> Tensor:
        parts = [table(masked[..., j]) for j, table in enumerate(self.tables)]
        x = torch.cat(parts, -1) + self.positions.weight[: masked.shape[1]]
        for block in self.blocks:
            x = block(x)
        valid = prime.valid_set(masked[targets], self.filter)
        return self.head(self.norm(x[targets])).masked_fill(~valid, -math.inf)

    def of_digits(self, logits: Tensor, truth: Tensor, masked: Tensor) -> Tensor:
        """−ln p of the masked digits of each target, one by one: [n] of logits [n, C], digits [n, ℓ] and whether they are masked [n, ℓ]."""
        margins = torch.einsum("nc,cjb->njb", logits.double().softmax(-1), self.digits)
        own: Tensor = margins.gather(2, truth[..., None].long())[..., 0]
        return -(own.log() * masked).sum(1)


def images(args: argparse.Namespace) -> np.ndarray[Any, Any]:
    """Pixels [n, 64] of 16 levels, in an order of their own."""
    if args.images:
        return np.load(args.images)
    from sklearn.datasets import load_digits

    pixels = np.minimum(load_digits().data.astype(np.uint8), LEVELS - 1)
    made: np.ndarray[Any, Any] = pixels[np.random.default_rng(0).permutation(len(pixels))]
    return made


def data_of(args: argparse.Namespace, kind: str, digits: int) -> pathlib.Path:
    """Shards with the digits of ℓ; of ℓ = 1 the tokens are the digits."""
    sections: dict[str, Any] = {"subtokens": {"length": digits}} if digits > 1 else {}
    if kind == "text":
        return common.job(args, f"prime-{digits}", **sections)
    folder: pathlib.Path = args.work / "codes"
    folder.mkdir(exist_ok=True)
    if not (folder / "digits.npy").exists():
        np.save(folder / "digits.npy", images(args))
    return common.job(
        args, f"prime-images-{digits}", tokenizer=None,
        input={"format": "codes", "paths": [str(folder / "digits.npy")], "codes": {"size": LEVELS, "length": PIXELS}, "holdout": {"validation": {"last_documents": args.held_out}}},
        pack={"length": PIXELS, "separator": "none", "boundary": "none"}, **sections,
    )  # fmt: skip


def of_the_perfect(shares: Any, digits: int) -> float:
    """Eq. 5 in nats per token for tokens that are independent of each other, with these shares [C], and a p that knows them: Σ_S B(|S|, ℓ − |S| + 1) H(D_S | the other
    digits) over sets S of masked digits, B(s, ℓ − s + 1) = ∫ t^{s−1} (1 − t)^{ℓ−s} dt. The entropy for ℓ = 1."""
    base = prime.base_of(len(shares), digits)
    written = prime.encode(np.arange(len(shares)), base, digits)

    def entropy(of: list[int]) -> float:
        joint: dict[tuple[int, ...], float] = {}
        for share, number in zip(shares, written):
            key = tuple(number[of])
            joint[key] = joint.get(key, 0.0) + float(share)
        return -sum(p * math.log(p) for p in joint.values() if p > 0)

    whole, total = entropy(list(range(digits))), 0.0
    for kept in itertools.product((False, True), repeat=digits):
        seen = [j for j in range(digits) if kept[j]]
        if masked := digits - len(seen):
            beta = math.factorial(masked - 1) * math.factorial(digits - masked) / math.factorial(digits)
            total += beta * (whole - entropy(seen))
    return total


def perfect(args: argparse.Namespace, kind: str) -> dict[str, float]:
    """What Eq. 5 gives a perfect p of single tokens of the held-out rows, by ℓ: of letters, or the mean over the pixels of an image."""
    vocab = args.vocab if kind == "text" else LEVELS
    rows = torch.cat([batch["input_ids"] for batch in common.validation(data_of(args, kind, 1), args.rows, COLUMNS)])
    places = [rows[:, 1:].flatten()] if kind == "text" else list(rows.T)
    counts = [np.bincount(place.numpy(), minlength=vocab) for place in places]
    return {
        str(digits): sum(of_the_perfect(count / count.sum(), digits) for count in counts) / len(counts)
        for digits in LENGTHS
    }


def student(args: argparse.Namespace, kind: str, digits: int, seed: int) -> tuple[list[tuple[int, float]], float]:
    """Eq. 5 on held-out rows by steps, and the bound after the last one, in nats per token."""
    folder = data_of(args, kind, digits)
    vocab, length = (args.vocab, args.length) if kind == "text" else (LEVELS, PIXELS)
    columns = [*COLUMNS, "subtokens"] if digits > 1 else COLUMNS
    torch.manual_seed(seed)
    model = Digits(args, vocab, length, digits)
    never = common.first_of(length) if kind == "text" else None
    tokens = length - (kind == "text")
    held_out = list(common.validation(folder, args.rows, columns))

    def loss(batch: Any, at: int, epoch: int | None = None, margins: bool = False) -> Tensor:
        example = prime.mask(batch, length=digits, seed=at, epoch=epoch, never=never)
        logits = model(example.input_ids, example.targets)
        if margins:
            each = model.of_digits(logits, example.digits[example.targets], example.digit_mask[example.targets])
        else:
            each = F.cross_entropy(logits, example.target_ids(), reduction="none")
        return (example.target_weights() * each).sum()

    @torch.no_grad()
    def measure(margins: bool = False) -> float:
        sums = [loss(batch, 1, draw, margins).item() for batch in held_out for draw in range(4)]
        return sum(sums) / (4 * tokens * sum(batch.rows for batch in held_out))

    data = common.batches(folder, columns, args.batch_size, seed)
    curve = common.fit(
        model,
        data,
        lambda step, batch: loss(batch, seed) / (tokens * batch.rows),
        args.steps,
        args.lr,
        args.every,
        measure,
    )
    return curve, measure(margins=True)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser_of(__doc__ or "", steps=600)
    parser.add_argument("--every", type=int, default=200, help="steps between measurements")
    parser.add_argument(
        "--images", type=pathlib.Path, help=".npy of pixels [n, 64] below 16, instead of scikit-learn's"
    )
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="images that are held out")
    args = common.arguments(parser, argv)
    results = Results(args, "prime", every=args.every, held_out=args.held_out)
    results.set("idle_step_ratio", {
        kind: {digits: prime.idle_step_ratio(digits, steps=length, positions=length) for digits in LENGTHS} for kind, length in (("text", args.length), ("images", PIXELS))
    })  # fmt: skip
    results.set("of_the_perfect", {kind: perfect(args, kind) for kind in ("text", "images")})
    for seed in range(args.seeds):
        for kind in ("text", "images"):
            for digits in LENGTHS:
                name = f"{kind} {digits}"
                if results.lack(name, seed):
                    began = time.monotonic()
                    curve, bound = student(args, kind, digits, seed)
                    results.add(name, seed, began, validation=curve[-1][1], bound=bound, curve=curve)


if __name__ == "__main__":
    main()
