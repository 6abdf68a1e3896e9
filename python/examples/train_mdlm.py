"""Trains a small masked diffusion language model (MDLM) on a Stillhouse data set, conditioned on its noise (Gumbel distillation).

    python train_mdlm.py s3://shards/owt-noise --steps 20000 --device cuda --dtype bfloat16 --checkpoint run.pt

::

    tokens      the  tax   of   1862         at the masked positions the student gets, in place of
    masked       ·    ▒    ·     ▒           the embedding of [MASK], a blueprint of what the teacher
    input       E_a  W·s  E_b   W·s          would have sampled there: W·softmax(ξ)   (paper: Eq. 10)

Started again with the same checkpoint, it goes on at the step where that was saved, with the very numbers of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stillhouse
import stillhouse.torch as st
from stillhouse.views import mdlm

NOISE = ["logprob", "noise_count", "noise_index", "noise_logprob"]


class Block(nn.Module):
    """A layer of a transformer in which every position sees every other: MDLM is not causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm_mlp(x))


class Student(nn.Module):
    """Tokens at the targets, from the other tokens and the noise at the targets."""

    def __init__(self, vocab_size: int, length: int, width: int, layers: int, noise: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size + 1, width)  # the last one is [MASK]
        self.positions = nn.Embedding(length, width)
        self.blueprint = nn.Linear(vocab_size, width, bias=False) if noise else None
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        if self.blueprint is not None:  # softmax(ξ) sums to 1 as a one-hot vector does: W is a table of embeddings
            nn.init.normal_(self.blueprint.weight, std=0.02)

    def forward(self, context: Tensor, targets: Tensor, noise: Tensor | None) -> Tensor:
        """Logits [n, V] at the n targets (``targets``: bool [B, L], ``noise``: softmax(ξ) [n, V]), and only there: they are the
        largest tensor of the step together with the noise."""
        x = self.tokens(context)
        if self.blueprint is not None:
            x[targets] = self.blueprint(noise).to(x.dtype)
        x = self.blocks(x + self.positions.weight[: context.shape[1]])
        # no logit for [MASK], which is never the answer
        return F.linear(self.norm(x[targets]), self.tokens.weight[:-1])


def epochs(loader: st.DataLoader) -> Iterator[Any]:
    """Batches without end; each epoch has its own order, and the views draw other masks in each."""
    while True:
        yield from loader


def example_of(batch: stillhouse.Batch, args: argparse.Namespace) -> dict[str, Tensor]:
    """What a step needs, as tensors: of the batch, and of the n positions that are masked in it.

    The masks are made on the CPU, keyed by (seed, epoch, global batch, sequence): no state to save, and the same on any number of ranks.
    """
    example = mdlm.mask(batch, seed=args.seed, mask_id=batch.info.vocab_size)
    made = {"targets": example.targets, "weights": example.target_weights(), "sequence_id": batch["sequence_id"]}
    if not args.noise:
        return {**made, "context": example.input_ids, "truth": example.target_ids()}
    # Made on the device, at the targets alone. bfloat16 halves it and keeps the small values that float16 would flush to 0.
    context, noise, truth = example.triplet(out="softmax", dtype=args.dtype, device=args.device)
    return {**made, "context": context, "noise": noise, "truth": truth}


def loss_at(model: nn.Module, example: Mapping[str, Tensor], args: argparse.Namespace) -> Tensor:
    """MDLM's bound on −log p(x) in nats per token: Σ w(t) · cross-entropy over the masked tokens, over all tokens."""
    example = {name: value.to(args.device) for name, value in example.items()}
    with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        logits = model(example["context"], example["targets"], example.get("noise"))
    each = F.cross_entropy(logits.float(), example["truth"], reduction="none")
    return (example["weights"] * each).sum() / example["context"].numel()


def loss_of(model: nn.Module, batch: stillhouse.Batch, args: argparse.Namespace) -> Tensor:
    """The loss of a batch."""
    return loss_at(model, example_of(batch, args), args)


@torch.no_grad()
def generate(model: Student, info: stillhouse.Info, args: argparse.Namespace, passes: int = 16) -> list[int]:
    """A text out of noise from the prior, in ``passes`` passes that each fix an equal share of the positions (ancestral sampling).

    The noise is scaled by 0.85 as in the paper's appendix C.1: what is far out in the tail misleads the student.
    """
    tokens = torch.full((1, info.length), info.vocab_size, device=args.device)
    order = torch.randperm(info.length, device=args.device)
    for begin in range(0, info.length, -(-info.length // passes)):
        masked = tokens == info.vocab_size
        noise = None
        if args.noise:  # noise of the same seed and position is the same in each pass: it need not be kept
            at = masked[0].nonzero()[:, 0]
            noise = stillhouse.noise.prior(args.seed + 1, 0, at, info.vocab_size, temperature=0.85, device=args.device)
        logits = model(tokens, masked, noise)
        drawn = tokens.masked_scatter(masked, torch.multinomial(logits.softmax(-1), 1)[:, 0])
        fixed = order[begin : begin - (-info.length // passes)]
        tokens[0, fixed] = drawn[0, fixed]
    return tokens[0].tolist()


def data_of(args: argparse.Namespace, kind: Any = st.StreamingShardDataset, **options: Any) -> Any:
    """The data set. What is not named in ``columns`` is not read."""
    columns = ["sequence_id", "input_ids", *(NOISE if args.noise else [])]
    return kind(args.dataset, columns=columns, batch_size=args.batch_size, seed=args.seed, **options)


def student_of(info: stillhouse.Info, args: argparse.Namespace) -> Student:
    """The same weights in each process."""
    torch.manual_seed(args.seed)
    return Student(info.vocab_size, info.length, args.width, args.layers, args.noise)


def optimizer_of(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)


def train(args: argparse.Namespace) -> list[float]:
    """Trains up to step ``args.steps`` and gives the losses of the steps made here."""
    loader = st.DataLoader(data_of(args), pin_memory=args.device == "cuda")
    info = loader.dataset.dataset.info
    model = student_of(info, args).to(args.device)
    optimizer = optimizer_of(model, args)
    begun = 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        begun = saved["step"]
        print(f"going on after step {begun}, epoch {loader.epoch}")

    losses: list[Tensor] = []  # on the device: reading each at once would make the GPU wait for Python
    clock, tokens = time.perf_counter(), 0
    for step, batch in zip(range(begun + 1, args.steps + 1), epochs(loader)):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / args.warmup)  # a function of the step, so that it needs no state
        loss = loss_of(model, batch, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        tokens += batch["input_ids"].numel()
        if step % args.log_every == 0 or step == args.steps:
            mean = torch.stack(losses[-args.log_every :]).mean().item()
            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            print(f"step {step}  loss {mean:.3f} nats/token  {tokens / seconds:,.0f} tokens/s", flush=True)
            tokens = 0
        if args.checkpoint and (step % args.save_every == 0 or step == args.steps):
            # No random state: nothing here draws but the keyed masks. A model with dropout must save torch's as well.
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "data": loader.state_dict(),
                "step": step,
            }
            torch.save(state, args.checkpoint + ".new")
            os.replace(args.checkpoint + ".new", args.checkpoint)  # whole or not at all
    if args.generate:
        print("generated:", generate(model, info, args))
    return torch.stack(losses).tolist() if losses else []


def parser_of(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("dataset", help="folder or URL of a finished data set with noise")
    parser.add_argument("--steps", type=int, default=1000, help="the step to train up to, counted from the very first")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup", type=int, default=100, help="steps in which the learning rate rises to --lr")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--noise", action=argparse.BooleanOptionalAction, default=True, help="--no-noise: plain MDLM")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the noise and the products"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", help="file to go on from, where it exists, and to save to")
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--generate", action="store_true", help="at the end, draw a text and print its token ids")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(arguments())
