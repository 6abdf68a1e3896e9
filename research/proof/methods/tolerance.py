"""How loose may the tolerance be before a student notices, at a vocabulary so small that it goes by noise within a minute?

    python tolerance.py --work /tmp/methods --program stillhouse --json tolerance-28.json
    python tolerance.py --vocab 512 --steps 1500 --work /tmp/methods --program stillhouse --json tolerance-512.json
    python tolerance.py --maze demo-out/maze-small --work /tmp/methods --program stillhouse --json tolerance-6.json

::

    stored T    noise as shards of tolerance T hold it        same rows, masks, draws and first weights:
    dense       the very same draw, of the live teacher's     what differs is what the tolerance leaves out
                whole p
    dense, own  the same as `dense` with other first weights and another order: how far two trainings scatter

The vocabulary is 28 (letters, space, <eos>) by default, or as many pairs of letters as `--vocab` says; with `--maze` it is the maze's 6. Losses are in nats per masked token of held-out rows, with the noise that the
student was trained with, with the dense one, and with noise of the prior, which knows nothing of the tokens.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import torch
import torch.nn.functional as F
from bd3lm import prior
from common import NOISE, Masked, Results
from torch import Tensor

import stillhouse
from stillhouse.views import mdlm

COLUMNS = ["sequence_id", "input_ids", *NOISE]
TOLERANCES = ("1e-4", "1e-3", "1e-2", "1e-1", "0.3")
SCATTER = 1000
"""What the seed of `dense, own` is more than that of the others."""
Blueprint = Callable[[Any], Tensor]


def shards(args: argparse.Namespace, tolerance: str) -> pathlib.Path:
    """The data set of a tolerance."""
    if args.maze is None:
        return common.noise_job(args, tolerance)
    folder: pathlib.Path = args.work / f"maze-{tolerance}"
    if not (folder / "manifest.json").exists():
        split = {"validation": {"share": 0.1}}
        text = (pathlib.Path(common.ROOT) / "research/maze/job.yaml").read_text()
        place = args.work / f"maze-job-{tolerance}"
        place.mkdir(exist_ok=True)
        shutil.copy(args.maze / "walks.jsonl", place / "walks.jsonl")
        shutil.copytree(args.maze / "teacher", place / "teacher", dirs_exist_ok=True)
        text = text.replace("paths: [walks.jsonl]", f"paths: [walks.jsonl], holdout: {json.dumps(split)}")
        text = text.replace("tolerance: 1e-3, draws: 16", f"tolerance: {tolerance}").replace(
            "path: dataset", f"path: {folder}"
        )
        (place / "job.yaml").write_text(text)
        subprocess.run([args.program, "run", place / "job.yaml"], check=True, stdout=subprocess.DEVNULL)
    return folder


def live(args: argparse.Namespace) -> Blueprint:
    """The noise that the shards hold, out of the live teacher's whole distribution."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    try:
        of = importlib.import_module("text")
    finally:
        sys.path.pop(0)
    made: Blueprint = of.Teacher(args.maze / "teacher" if args.maze else common.teacher(args)).dense
    return made


def stored(example: Any) -> Tensor:
    made: Tensor = example.noise(out="softmax", threads=1)
    return made


def masked(batch: Any, args: argparse.Namespace, seed: int, epoch: int | None = None) -> Any:
    return mdlm.mask(batch, seed=seed, epoch=epoch, mask_id=args.vocab, never=common.first_of(args.length))


@torch.no_grad()
def losses(
    model: Masked, args: argparse.Namespace, folder: pathlib.Path, blueprint: Blueprint
) -> tuple[list[float], list[int]]:
    """Of each batch of held-out rows, under four draws of masks: the mean, and the number of masked tokens."""
    made, counts = [], []
    for batch in common.validation(folder, args.rows, COLUMNS):
        examples = [masked(batch, args, 1, draw) for draw in range(4)]
        each = [
            F.cross_entropy(model(e.input_ids, e.targets, blueprint(e)), e.target_ids(), reduction="none")
            for e in examples
        ]
        made.append(torch.cat(each).mean().item())
        counts.append(sum(len(of) for of in each))
    return made, counts


def student(args: argparse.Namespace, name: str, seed: int, dense: Blueprint) -> dict[str, Any]:
    own = name.split()[1] if name.startswith("stored") else "1e-3"
    folder, blueprint = shards(args, own), stored if name.startswith("stored") else dense
    at = seed + SCATTER * (name == "dense, own")
    torch.manual_seed(at)
    model = Masked(args, noise=True)

    def loss(step: int, batch: Any) -> Tensor:
        example = masked(batch, args, at)
        return F.cross_entropy(model(example.input_ids, example.targets, blueprint(example)), example.target_ids())

    curve = common.fit(model, common.batches(folder, COLUMNS, args.batch_size, at), loss, args.steps, args.lr)
    each, counts = losses(model, args, folder, blueprint)
    shown = {
        "prior": losses(model, args, folder, lambda example: prior(example, args.vocab))[0],
        "dense": losses(model, args, folder, dense)[0],
    }
    mean = sum(loss * count for loss, count in zip(each, counts)) / sum(counts)
    return {"validation": mean, "batches": each, "targets": counts, "shown": shown, "curve": curve}


@torch.no_grad()
def sizes(args: argparse.Namespace, tolerance: str, dense: Blueprint) -> dict[str, Any]:
    """Bytes per token, and the total variation between stored and dense softmax(ξ) at held-out masked tokens."""
    folder = shards(args, tolerance)
    parts = stillhouse.open(str(folder)).manifest["shards"]
    tokens = sum(part["tokens"] for part in parts)
    far = []
    for batch in common.validation(folder, min(args.rows, 64), COLUMNS):
        example = masked(batch, args, 1, 0)
        far.append((stored(example) - dense(example)).abs().sum(1) / 2)
    tv = torch.cat(far)
    of = {name: sum(part["column_bytes"][name] for part in parts) / tokens for name in NOISE}
    return {"bytes_per_token": of, "mean": tv.mean().item(), "largest": tv.max().item(), "tokens": len(tv)}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser_of(__doc__ or "", steps=600)
    parser.add_argument("--maze", type=pathlib.Path, help="work folder of ../../maze/run.py, instead of the speeches")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tolerances", nargs="+", default=list(TOLERANCES))
    parser.set_defaults(layers=3, seeds=5)
    args = common.arguments(parser, argv)
    if args.maze:
        args.vocab, args.length, args.maze = 6, 12, args.maze.resolve()
    results = Results(args, "tolerance", maze=args.maze is not None)
    dense = live(args)
    held = results.found.get("tolerances", {})
    made = {tolerance: sizes(args, tolerance, dense) for tolerance in args.tolerances if tolerance not in held}
    results.set("tolerances", held | made)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in ("dense", "dense, own", *(f"stored {tolerance}" for tolerance in args.tolerances)):
            if results.lack(name, seed):
                began = time.monotonic()
                results.add(name, seed, began, **student(args, name, seed, dense))


if __name__ == "__main__":
    main()
