"""What the small experiments of all methods share: a corpus, a teacher, jobs, layers, a training loop, and results that are kept.

::

    speeches ──► letters.jsonl ──► BPE of few tokens (28: letters) ──► job (rows) ──► teacher (GPT-2, 3 layers of 96)
                                                              └───────► job of a method (noise, top-k, partitions, orders, digits) ──► its students

The vocabulary of 28 (letters, space, <eos>) and rotary positions let a student on one core learn something within a minute. Every program keeps what its JSON file holds and trains what is
missing, so that seeds can be added.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

import stillhouse
import stillhouse.torch as st

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "research/proof"))
from origin import machine, marked

TEMPERATURE = 0.85
"""τ of the noise at generation (Gumbel distillation, appendix C.1)."""
NOISE = ["logprob", "noise_count", "noise_index", "noise_logprob"]
EOS = 0
AVERAGED = 50
"""Steps of which a learning curve has the mean loss."""
VALIDATION = 2
"""Documents that are held out: the last ones."""


def parser_of(description: str, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder that all methods share")
    parser.add_argument("--program", default="stillhouse", help="the stillhouse program")
    parser.add_argument("--json", type=pathlib.Path, required=True, help="raw results; what is there is kept")
    parser.add_argument("--corpus", type=pathlib.Path, default=ROOT / "assets/corpus/sotu-small.jsonl.gz")
    parser.add_argument("--documents", type=int, default=8, help="of the corpus, the first ones")
    parser.add_argument("--vocab", type=int, default=28, help="tokens of the tokenizer that is trained")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--teacher-steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--rows", type=int, default=128, help="validation rows")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def arguments(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    return args


class Results:
    """The raw results of a program, in its file after each student."""

    def __init__(self, args: argparse.Namespace, experiment: str, **more: Any) -> None:
        self.file = args.json
        names = (
            "documents",
            "vocab",
            "length",
            "steps",
            "teacher_steps",
            "batch_size",
            "width",
            "layers",
            "lr",
            "rows",
        )
        how = {name: getattr(args, name) for name in names} | more
        self.found: dict[str, Any] = {
            "experiment": experiment,
            "training": how,
            "machine": machine(args.threads),
            "students": [],
        }
        if self.file.exists():
            self.found = json.loads(self.file.read_text())
            if self.found["training"] != how:
                raise SystemExit(
                    f"{self.file} holds students of {self.found['training']}, asked were {how}; valid: another file, or the same settings"
                )
        self.marked = False

    def lack(self, student: str, seed: int) -> bool:
        """Whether a student still has to be trained."""
        return all((done["student"], done["seed"]) != (student, seed) for done in self.found["students"])

    def add(self, student: str, seed: int, began: float, **found: Any) -> None:
        seconds = round(time.monotonic() - began, 1)
        if not self.marked:
            marked(self.found)
            self.marked = True
        self.found["students"].append({"student": student, "seed": seed, **found, "seconds": seconds})
        self.write()
        told = "  ".join(f"{name} {value:.4f}" for name, value in found.items() if isinstance(value, float))
        print(f"seed {seed}  {student:16} {told}  {seconds} s", flush=True)

    def set(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.write()

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(rounded(self.found), indent=1) + "\n")
        os.replace(new, self.file)


def rounded(value: Any) -> Any:
    """The same with numbers of six significant digits: small files, no false precision."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(of) for key, of in value.items()}
    return [rounded(of) for of in value] if isinstance(value, (list, tuple)) else value


# Corpus, teacher, jobs


def letters(args: argparse.Namespace) -> pathlib.Path:
    """The speeches in small letters and spaces alone."""
    file: pathlib.Path = args.work / f"letters-{args.documents}.jsonl"
    if not file.exists():
        with gzip.open(args.corpus, "rt") as lines:
            texts = [json.loads(line)["text"] for line in lines][: args.documents]
        plain = [" ".join(re.findall("[a-z]+", text.lower())) for text in texts]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in plain))
    return file


def tokenizer(args: argparse.Namespace) -> pathlib.Path:
    """A folder with a tokenizer.json: pairs of letters merged until there are ``vocab`` tokens; 28 is letters, space and <eos>."""
    folder: pathlib.Path = args.work / f"tokenizer-{args.vocab}"
    if not (folder / "tokenizer.json").exists():
        texts = [json.loads(line)["text"] for line in letters(args).read_text().splitlines()]
        pieces = ["<eos>", " ", *map(chr, range(ord("a"), ord("z") + 1))]
        merges = merged(texts[:-VALIDATION], args.vocab - len(pieces))
        special = {
            "id": EOS,
            "content": "<eos>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        made = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None,
            "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithNext", "invert": False},
            "post_processor": None, "decoder": {"type": "Fuse"},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                "byte_fallback": False, "vocab": {piece: i for i, piece in enumerate(pieces + [a + b for a, b in merges])}, "merges": [list(pair) for pair in merges],
            },
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder


def merged(texts: list[str], count: int) -> list[tuple[str, str]]:
    """The merges of byte-pair encoding: the most frequent pair, ties by its letters; so that a tokenizer is the same everywhere."""
    words: dict[tuple[str, ...], int] = {}
    for text in texts:
        for word in re.findall(" ?[a-z]+", text):
            words[tuple(word)] = words.get(tuple(word), 0) + 1
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: dict[tuple[str, str], int] = {}
        for word, times in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] = pairs.get(pair, 0) + times
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        after: dict[tuple[str, ...], int] = {}
        for word, times in words.items():
            after_word = _replaced(word, best)
            after[after_word] = after.get(after_word, 0) + times
        words = after
    return merges


def _replaced(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    made: list[str] = []
    at = 0
    while at < len(word):
        both = word[at : at + 2] == pair
        made.append(pair[0] + pair[1] if both else word[at])
        at += 2 if both else 1
    return tuple(made)


def job(args: argparse.Namespace, name: str, **sections: Any) -> pathlib.Path:
    """The data set of a job with these sections; a finished one is not made again."""
    folder: pathlib.Path = args.work / f"{name}-{args.vocab}-{args.length}-{args.documents}"
    if not (folder / "manifest.json").exists():
        whole: dict[str, Any] = {
            "version": 1, "name": f"methods-{name}", "seed": 17,
            "input": {"format": "jsonl", "paths": [str(letters(args))], "text": "text", "holdout": {"validation": {"last_documents": VALIDATION}}},
            "tokenizer": {"path": str(tokenizer(args)), "bos": "<eos>", "eos": "<eos>"},
            "pack": {"mode": "wrap", "length": args.length, "separator": "eos", "boundary": "bos_eos", "remainder": "drop"},
            "output": {"path": str(folder)},
        }  # fmt: skip
        whole = {key: of for key, of in (whole | sections).items() if of is not None}
        file = args.work / f"job-{folder.name}.json"
        file.write_text(json.dumps(whole, indent=1))
        subprocess.run([args.program, "run", file], check=True, stdout=subprocess.DEVNULL)
    return folder


def noise_job(args: argparse.Namespace, tolerance: str = "1e-3", topk: int = 0) -> pathlib.Path:
    """The data set with the teacher's noise."""
    folder = teacher(args)
    extract = {
        "teacher": {"path": str(folder), "device": "cpu", "dtype": "f32"},
        "noise": {"codec": "replay", "tolerance": float(tolerance)},
    }
    name = f"noise-{tolerance}" + (f"-top{topk}" if topk else "")
    return job(args, name, tokenizer={"path": str(folder)}, extract=extract | ({"topk": topk} if topk else {}))


def teacher(args: argparse.Namespace) -> pathlib.Path:
    """An autoregressive teacher of these rows, trained where there is none: a GPT-2 checkpoint."""
    folder: pathlib.Path = args.work / f"teacher-{args.vocab}-{args.length}-{args.documents}-{args.teacher_steps}"
    if (folder / "tokenizer.json").exists():
        return folder
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds, which not every program has to wait

    rows = job(args, "rows")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=args.vocab, n_positions=args.length, n_embd=96, n_layer=3, n_head=3, bos_token_id=EOS, eos_token_id=EOS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)

    def loss(batch: Any) -> Tensor:
        ids = batch["input_ids"].long()
        return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    fit(
        model,
        batches(rows, ["sequence_id", "input_ids"], 32, 0),
        lambda step, batch: loss(batch),
        args.teacher_steps,
        1e-3,
    )
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text((tokenizer(args) / "tokenizer.json").read_text())
    return folder


class Judge:
    """The teacher as a judge of what students write."""

    def __init__(self, folder: pathlib.Path) -> None:
        from transformers import GPT2LMHeadModel

        self.model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> dict[str, float]:
        """Generative perplexity of rows behind their first token, and the mean entropy of a row's own tokens in nats."""
        lost = torch.cat([
            F.cross_entropy(self.model(part).logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="none") for part in rows.split(64)
        ])  # fmt: skip
        shares = torch.stack(
            [torch.bincount(row, minlength=self.model.config.vocab_size) for row in rows[:, 1:]]
        ).double() / (rows.shape[1] - 1)
        return {"perplexity": math.exp(lost.mean().item()), "entropy": float(torch.special.entr(shares).sum(1).mean())}


def batches(folder: pathlib.Path, columns: list[str], size: int, seed: int) -> Iterator[Any]:
    """Batches without end."""
    loader = st.DataLoader(
        st.StreamingShardDataset(str(folder), split="train", columns=columns, batch_size=size, seed=seed)
    )
    while True:
        yield from loader


def validation(folder: pathlib.Path, rows: int, columns: list[str], size: int = 32) -> Iterator[Any]:
    """The first so many held-out rows."""
    ds = stillhouse.open(str(folder), split="validation").select_columns(columns)
    most = min(rows, len(ds))
    for start in range(0, most, size):
        yield ds[start : min(start + size, most)].torch()


def fit(
    model: nn.Module, data: Iterator[Any], loss_of: Callable[[int, Any], Tensor], steps: int, lr: float,
    every: int = 0, measure: Callable[[], float] | None = None, begun: int = 0,
) -> list[tuple[int, float]]:  # fmt: skip
    """Trains for so many steps: warm-up over 40 steps, cosine to a tenth. Gives the learning curve: ``measure()`` at every ``every``-th step, without it the mean loss of
    each ``AVERAGED`` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    curve: list[tuple[int, float]] = []
    losses: list[float] = []
    for step, batch in zip(range(steps), data):
        rate = min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * rate
        loss = loss_of(begun + step, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % (every or AVERAGED) == 0 or step + 1 == steps:
            if measure is None:
                curve.append((begun + step + 1, sum(losses) / len(losses)))
            elif every:
                model.eval()
                curve.append((begun + step + 1, measure()))
                model.train()
            losses = []
    model.eval()
    return curve


# Layers


class Block(nn.Module):
    """A layer of a transformer: attention to ``memory`` (by default to itself) under a mask, then an MLP.

    With ``sink`` there is one more key that everybody sees, so that a position that may see nothing has something to attend to.
    """

    def __init__(self, width: int, sink: bool = False) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norm_x, self.norm_memory, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.sink = nn.Parameter(torch.zeros(1, 1, width)) if sink else None

    def forward(
        self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None, at: Tensor | None = None
    ) -> Tensor:
        """``mask``: bool [Q, K] or [B, Q, K], true where attended to. ``at``: positions [L] or [B, L] of ``x`` and ``memory``, by default 0, 1, ..."""
        seen = self.norm_memory(x if memory is None else memory)
        turn = rotation(torch.arange(x.shape[1]) if at is None else at, x.shape[2] // self.heads)
        q = turned(self._split(self.q(self.norm_x(x))), turn)
        k, v = (self._split(part) for part in self.kv(seen).chunk(2, -1))
        k = turned(k, turn)
        if self.sink is not None:
            own = (
                self._split(part).expand(len(x), -1, -1, -1)
                for part in self.kv(self.norm_memory(self.sink)).chunk(2, -1)
            )
            k, v = (torch.cat([first, rest], 2) for first, rest in zip(own, (k, v)))
            mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        if mask is not None and mask.dim() == 3:
            mask = mask[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


def rotation(at: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary positions, [.., 1, L, width/2]: a head finds its neighbours without learning every position on its own."""
    rate = 100.0 ** (-torch.arange(width // 2) / (width // 2))
    angle = (at[..., None] * rate).unsqueeze(-3)
    return angle.cos(), angle.sin()


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = turn
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def embedding(count: int, width: int) -> nn.Embedding:
    made = nn.Embedding(count, width)
    nn.init.normal_(made.weight, std=0.02)
    return made


class Masked(nn.Module):
    """An MDLM student: tokens at the targets from the others; with ``noise`` the blueprint W·softmax(ξ) stands for [MASK]."""

    def __init__(self, args: argparse.Namespace, noise: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = embedding(args.vocab + 1, args.width), embedding(args.length, args.width)
        self.blueprint = nn.Linear(args.vocab, args.width, bias=False) if noise else None
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocab)
        if self.blueprint is not None:
            nn.init.normal_(self.blueprint.weight, std=0.02)

    def forward(self, context: Tensor, targets: Tensor, noise: Tensor | None = None) -> Tensor:
        x = self.tokens(context.long())
        if self.blueprint is not None:
            x[targets] = self.blueprint(noise)
        x = x + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[targets]))


def first_of(length: int) -> Tensor:
    """The first position, which is given and never a target."""
    return torch.arange(length) == 0


@torch.no_grad()
def generate(model: Masked, args: argparse.Namespace, count: int, passes: int, seed: int) -> Tensor:
    """Rows [count, L] in so many passes, MDLM's ancestral sampler; noise is the prior's, the same in each pass."""
    torch.manual_seed(seed)
    tokens = torch.full((count, args.length), args.vocab)
    tokens[:, 0] = EOS
    noise = None
    if model.blueprint is not None:
        at = torch.arange(args.length)
        noise = stillhouse.noise.prior(seed, torch.arange(count), at, args.vocab, temperature=TEMPERATURE, threads=1)
    for left in range(passes, 0, -1):
        targets = tokens == args.vocab
        if not targets.any():
            break
        logits = model(tokens, targets, noise[targets] if noise is not None else None)
        drawn = tokens.masked_scatter(targets, torch.multinomial(logits.softmax(-1), 1)[:, 0])
        tokens = torch.where(targets & (torch.rand(tokens.shape) < 1 / left), drawn, tokens)
    return tokens


def decoded(args: argparse.Namespace, rows: Tensor) -> list[str]:
    made: list[str] = Tokenizer.from_file(str(tokenizer(args) / "tokenizer.json")).decode_batch(rows.tolist())
    return made
