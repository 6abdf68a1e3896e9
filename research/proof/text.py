"""How loose may the tolerance of stored noise be before a student notices? A text student on each tolerance, beside the same noise without loss.

    python text.py --work /tmp/text --program stillhouse --teacher teacher-nano-gpt2 --corpus sotu.jsonl.gz --json text.json

::

    stored T  replayed from shards of tolerance T         same rows, masks and first weights for all,
    dense     the very same draw, with the live           and of the first two the same draws: what
              teacher's whole p instead of corrections    differs is what the tolerance leaves out
    fresh     another draw in every step, whole p
    mdlm      no noise (and other first weights: it has no projection of noise)
    topk      no noise; the teacher's likeliest tokens that the shards hold in place of the text's token

Losses are in nats per masked token (not weighted by time), of validation rows that all students share, each with the noise it was trained with, with the dense one, and
with noise of the prior, which knows nothing of the tokens (the loss that is not conditional). The difference from the student of dense noise is paired by batch of rows. The total variation between stored and dense softmax(ξ) is measured
on the way: it must not be above the tolerance. Results are written after each student; students that are in the file already are not trained again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GPT2LMHeadModel

import stillhouse
import stillhouse.torch as st
from stillhouse import noise
from stillhouse.views import mdlm

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python/examples"), str(HERE)]
from origin import machine, marked
from train_mdlm import NOISE, Student

Blueprint = Callable[[Any], Tensor]
"""softmax(ξ) [n, V] at the targets of an example."""

PASSES = (8, 32, 128)
"""Passes of generation (NFE)."""
TOPK = 16
NOISE_SEED = 42
ROWS = 4
"""Validation rows of a batch; the paired errors are over these batches."""


def extract(args: argparse.Namespace, tolerance: str) -> pathlib.Path:
    """The data set of a tolerance. All have the same rows and the same seed."""
    folder = (
        args.work
        / f"tol-{tolerance}-{args.documents}{f'-noise-{args.noise_seed}' if args.noise_seed != NOISE_SEED else ''}"
    )
    corpus = args.work / f"corpus-{args.documents}.jsonl"
    if not corpus.exists():
        with gzip.open(args.corpus, "rt") as lines:
            corpus.write_text("".join(islice(lines, args.documents)))
    job = {
        "version": 1, "name": "proof-text", "seed": args.noise_seed,
        "input": {"format": "jsonl", "paths": [str(corpus)], "text": "text", "holdout": {"validation": {"last_documents": 1}}},
        "tokenizer": {"path": str(args.teacher)},
        "pack": {"mode": "wrap", "length": args.length, "separator": "eos", "boundary": "bos_eos", "remainder": "drop"},
        "extract": {"teacher": {"path": str(args.teacher), "device": "cpu", "dtype": "f32"}, "noise": {"codec": "replay", "tolerance": float(tolerance)}, "topk": TOPK},
        "output": {"path": str(folder)},
    }  # fmt: skip
    if not (folder / "manifest.json").exists():
        file = args.work / f"job-{tolerance}.json"
        file.write_text(json.dumps(job))
        subprocess.run([args.program, "run", file], check=True)
    return folder


class Teacher:
    """Whole distributions out of the live teacher, and noise made of them."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def probabilities(self, example: Any) -> Tensor:
        """p(x_i = · | x_<i) at the targets [n, V]; the first position of a row is given and no target."""
        hidden = self.model.transformer(example.batch["input_ids"].long()).last_hidden_state
        return self.model.lm_head(hidden.roll(1, 1)[example.targets]).softmax(-1)

    def dense(self, example: Any) -> Tensor:
        """The noise that the data set stores, without loss: its own e_k and e_0 (Eq. 4), and the whole p."""
        info, targets = example.batch.info, example.targets
        rows, at = targets.nonzero(as_tuple=True)
        xi = noise.prior(
            info.noise.seed, example.batch["sequence_id"][rows], at[:, None], info.vocab_size, out="gumbel"
        )
        token = example.target_ids()[:, None]
        own = example.noise(out="gumbel").gather(1, token)  # ξ_x = −ln(p_x·e_0)
        e0 = (-own - example.batch["logprob"][targets][:, None]).exp()
        return _softmax((-xi[:, 0]).exp(), e0, self.probabilities(example), token)

    def fresh(self, generator: torch.Generator) -> Blueprint:
        """Another draw in each step."""

        def draw(example: Any) -> Tensor:
            p = self.probabilities(example)
            e, e0 = (torch.empty(len(p), n).exponential_(generator=generator) for n in (p.shape[1], 1))
            return _softmax(e, e0, p, example.target_ids()[:, None])

        return draw


def _softmax(e: Tensor, e0: Tensor, p: Tensor, token: Tensor) -> Tensor:
    """softmax(ξ): E_k = e_k + p_k·e_0, and E_x = p_x·e_0 for the token."""
    share = p * e0
    inverse = (e + share).scatter_(1, token, share.gather(1, token)).reciprocal_()
    return inverse / inverse.sum(1, keepdim=True)


def stored(example: Any) -> Tensor:
    made: Tensor = example.noise(out="softmax", threads=1)
    return made


def prior(example: Any) -> Tensor:
    """Noise that knows nothing of the tokens."""
    rows, at = example.targets.nonzero(as_tuple=True)
    made: Tensor = noise.prior(
        99, example.batch["sequence_id"][rows], at[:, None], example.batch.info.vocab_size, threads=1
    )[:, 0]
    return made


def masked(batch: Any, seed: int) -> Any:
    first = torch.arange(batch["input_ids"].shape[1]) == 0
    return mdlm.mask(batch, seed=seed, mask_id=batch.info.vocab_size, never=first)


def loader_of(folder: pathlib.Path, split: str, batch: int, seed: int) -> Any:
    columns = ["sequence_id", "input_ids", "topk_index", "topk_logprob", *NOISE]
    return st.DataLoader(
        st.StreamingShardDataset(
            str(folder), split=split, columns=columns, batch_size=batch, seed=seed, drop_last=False
        )
    )


def train(
    args: argparse.Namespace, folder: pathlib.Path, blueprint: Blueprint | None, seed: int, topk: bool = False
) -> tuple[Student, list[float]]:
    """A trained student and its mean loss by twenties of steps. ``topk``: taught by the teacher's likeliest tokens."""
    loader = loader_of(folder, "train", args.batch_size, seed)
    info = loader.dataset.dataset.info
    torch.manual_seed(seed)
    model = Student(info.vocab_size, info.length, args.width, args.layers, blueprint is not None)
    if (
        model.blueprint is not None
    ):  # W begins as the table of tokens: else so short a training does not come to use noise at all
        with torch.no_grad():
            model.blueprint.weight.copy_(model.tokens.weight[:-1].T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    losses: list[float] = []
    while len(losses) < args.steps:
        for batch in loader:
            if len(losses) == args.steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, (len(losses) + 1) / 20)
            example = masked(batch, seed)
            logits = model(example.input_ids, example.targets, blueprint(example) if blueprint else None)
            loss = of_topk(logits, example) if topk else F.cross_entropy(logits, example.target_ids())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return model.eval(), [sum(part) / len(part) for part in (losses[i : i + 20] for i in range(0, len(losses), 20))]


def of_topk(logits: Tensor, example: Any) -> Tensor:
    """Cross-entropy with the teacher's k likeliest tokens, and with all others as one outcome."""
    index, p = (example.batch[column][example.targets] for column in ("topk_index", "topk_logprob"))
    q = logits.log_softmax(-1).gather(1, index.long())
    rest, q_rest = ((1 - part.exp().sum(1)).clamp(min=0) for part in (p, q))
    return (-(p.exp() * q).sum(1) - rest * q_rest.clamp(min=1e-6).log()).mean()


def examples(folder: pathlib.Path, rows: int) -> Iterator[Any]:
    """Validation examples of the first so many rows: the same masks and draws whatever the tolerance is."""
    ds = stillhouse.open(str(folder), split="validation")
    for start in range(0, min(rows, len(ds)), ROWS):
        yield masked(ds[start : min(start + ROWS, rows)].torch(), 1)


@torch.no_grad()
def validate(
    model: Student, folder: pathlib.Path, rows: int, blueprint: Blueprint | None
) -> tuple[list[float], list[int]]:
    """Mean loss of each batch, and its number of targets."""
    losses, counts = [], []
    for example in examples(folder, rows):
        logits = model(example.input_ids, example.targets, blueprint(example) if blueprint else None)
        losses.append(F.cross_entropy(logits, example.target_ids()).item())
        counts.append(int(example.targets.sum()))
    return losses, counts


@torch.no_grad()
def variation(folder: pathlib.Path, rows: int, teacher: Teacher) -> dict[str, float]:
    """Total variation between stored and dense softmax(ξ) over the validation targets, and how often argmax(l + ξ) is the token."""
    of_token, held, own = [], [], []
    for example in examples(folder, rows):
        p, xi = teacher.probabilities(example), example.noise(out="gumbel")
        of_token.append((stored(example) - teacher.dense(example)).abs().sum(1) / 2)
        own.append(xi.softmax(1).gather(1, example.target_ids()[:, None]))
        held.append((p.log() + xi).argmax(1) == example.target_ids())
    tv = torch.cat(of_token)
    return {
        "mean": tv.mean().item(),
        "largest": tv.max().item(),
        "tokens": len(tv),
        "condition": torch.cat(held).float().mean().item(),
        "softmax_of_token_median": torch.cat(own).median().item(),
        "softmax_of_token_mean": torch.cat(own).mean().item(),
    }


@torch.no_grad()
def generate(model: Student, vocab: int, length: int, bos: int, texts: int, passes: int, seed: int) -> Tensor:
    """Rows [texts, length], MDLM's ancestral sampler; noise of the prior scaled by 0.85, the same in each pass.

    What is unmasked in a pass is drawn first and its logits are made alone: a position's logits are made once, whatever the number of passes.
    """
    torch.manual_seed(seed)
    made = []
    for first in range(0, texts, 8):
        tokens = torch.full((min(8, texts - first), length), vocab)
        tokens[:, 0] = bos
        blueprint = None
        if model.blueprint is not None:
            at = torch.arange(length)
            xi = [
                noise.prior(seed, torch.tensor([first + row]), at, vocab, temperature=0.85, threads=1)
                for row in range(len(tokens))
            ]
            blueprint = torch.cat([model.blueprint(of) for of in xi])
        for left in range(passes, 0, -1):
            targets = tokens == vocab
            now = targets & (torch.rand(tokens.shape) < 1 / left)
            if now.any():
                x = model.tokens(tokens)
                if blueprint is not None:
                    x[targets] = blueprint[targets]
                states = model.norm(model.blocks(x + model.positions.weight)[now])
                logits = F.linear(states, model.tokens.weight[:-1])
                tokens[now] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        made.append(tokens)
    return torch.cat(made)


def score(args: argparse.Namespace, rows: Tensor, name: str) -> dict[str, Any]:
    """What `stillhouse score` says of texts."""
    tokenizer = Tokenizer.from_file(str(args.teacher / "tokenizer.json"))
    file = args.work / f"samples-{name}.jsonl"
    file.write_text("".join(json.dumps({"text": tokenizer.decode(row)}) + "\n" for row in rows[:, 1:].tolist()))
    command = [args.program, "score", file, "--teacher", args.teacher, "--json", "--threads", "1", "--device", "cpu"]
    made: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    del made["teacher"]  # a path of this machine
    return made


def measure(args: argparse.Namespace, teacher: Teacher, name: str, seed: int) -> dict[str, Any]:
    """One student: trained, validated, and what it writes."""
    began = time.monotonic()
    folders = {tolerance: extract(args, tolerance) for tolerance in args.tolerances}
    own = folders[name.split()[1]] if name.startswith("stored") else folders[args.tolerances[-1]]
    dense = teacher.dense
    of = {"mdlm": None, "topk": None, "dense": dense, "fresh": teacher.fresh(torch.Generator().manual_seed(seed))}
    blueprint = stored if name.startswith("stored") else of[name]
    model, curve = train(args, own, blueprint, seed, topk=name == "topk")
    trained = time.monotonic() - began
    losses, counts = validate(model, own, args.rows, dense if name == "fresh" else blueprint)
    result: dict[str, Any] = {"student": name, "seed": seed, "curve": curve, "validation": losses, "targets": counts}
    result["shown"] = {}
    if blueprint is not None:  # noise of no token: what it costs says how much the student goes by noise
        result["shown"]["prior"] = validate(model, own, args.rows, prior)[0]
    if name == "dense":  # what a student of exact noise loses where it is shown stored noise
        for tolerance, folder in folders.items():
            result["shown"][tolerance] = validate(model, folder, args.rows, stored)[0]
    elif blueprint is not None:
        result["shown"]["dense"] = validate(model, own, args.rows, dense)[0]
    info = stillhouse.open(str(own)).info
    result["written"] = {}
    for passes in PASSES if args.texts else ():
        rows = generate(model, info.vocab_size, info.length, info.special_tokens["bos"], args.texts, passes, 7 + seed)
        result["written"][passes] = score(args, rows, f"{name.replace(' ', '-')}-{seed}-{passes}")
    return {
        **result,
        "seconds_training": round(trained),
        "seconds": round(time.monotonic() - began),
        "machine": machine(args.threads),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for data sets and samples")
    parser.add_argument("--program", default="stillhouse", help="the stillhouse program")
    parser.add_argument("--teacher", type=pathlib.Path, required=True)
    parser.add_argument("--corpus", type=pathlib.Path, required=True, help="jsonl.gz")
    parser.add_argument(
        "--documents", type=int, default=6, help="of the corpus, the first ones; the last is for validation"
    )
    parser.add_argument("--tolerances", nargs="+", default=["1e-1", "1e-2", "1e-3", "1e-4"])
    parser.add_argument(
        "--students",
        nargs="+",
        default=["mdlm", "dense", "stored 1e-2", "stored 1e-3", "topk", "stored 1e-4", "fresh", "stored 1e-1"],
    )
    parser.add_argument("--seeds", type=int, default=3, help="of students, how many")
    parser.add_argument("--first-seed", type=int, default=0, help="of students, the first")
    parser.add_argument("--noise-seed", type=int, default=NOISE_SEED, help="of the noise that the shards hold")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--texts", type=int, default=8, help="texts that each student writes for each number of passes")
    parser.add_argument("--rows", type=int, default=24, help="validation rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, required=True, help="where the raw results go, after each student")
    args = parser.parse_args(argv)
    args.work, args.teacher, args.corpus = args.work.resolve(), args.teacher.resolve(), args.corpus.resolve()
    for folder in (args.work, args.json.parent):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    how = {
        name: getattr(args, name)
        for name in ("documents", "steps", "batch_size", "length", "width", "layers", "lr", "texts", "rows")
    }
    result: dict[str, Any] = {
        "experiment": "text", "training": how, "noise_seed": args.noise_seed, "machine": machine(args.threads), "tolerances": {}, "students": [],
    }  # fmt: skip
    if args.json.exists():
        result = json.loads(args.json.read_text())
        held, asked = (
            {**of, "noise_seed": seed}
            for of, seed in ((result["training"], result.get("noise_seed", NOISE_SEED)), (how, args.noise_seed))
        )
        if held != asked:
            parser.error(f"{args.json} holds students of {held}, asked were {asked}; valid: another file")
    teacher = Teacher(args.teacher)
    for tolerance in args.tolerances:
        folder = extract(args, tolerance)
        shards = stillhouse.open(str(folder)).manifest["shards"]
        tokens = sum(shard["tokens"] for shard in shards)
        columns = {name: sum(shard["column_bytes"][name] for shard in shards) / tokens for name in NOISE}
        if tolerance not in result["tolerances"]:
            result["tolerances"][tolerance] = {
                "bytes_per_token": columns,
                "variation": variation(folder, args.rows, teacher),
            }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"tolerance {tolerance}: {result['tolerances'][tolerance]}", flush=True)
    there = {(done["student"], done["seed"]) for done in result["students"]}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in args.students:
            if (name, seed) in there:
                continue
            done = measure(args, teacher, name, seed)
            marked(result)
            result["students"].append(done)
            args.json.write_text(json.dumps(result, indent=1) + "\n")
            mean = sum(done["validation"]) / len(done["validation"])
            print(f"seed {seed}  {name:12} validation {mean:.4f} nats/token  {done['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
