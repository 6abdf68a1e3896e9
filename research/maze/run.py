"""The maze of the Gumbel paper (Table 7): success of students with and without noise, by number of passes, in one command.

    python run.py --work /tmp/maze --program stillhouse --json maze.json
    python run.py --work /tmp/maze --seeds 1 --epochs 20 --paths 500      # a small one
    python run.py --work /tmp/maze --seeds 7 --json maze.json             # two seeds more
    python run.py --work /tmp/again --teacher-seed 1 --first-seed 5 --seeds 2 --json again.json   # another teacher, other noise, other students

Walks are written as text, a teacher is trained on them, a Stillhouse job extracts its noise, and for each seed students are trained on its shards:
`mdlm` without noise; `stored 1` with the one draw of each token that most jobs keep; `stored 16` with one of 16 draws in each step; `fresh` with
dense noise that the live teacher gives anew in each step.

Nothing is made twice, so that a run of hours may be stopped, and seeds added: walks, teacher, data set and every student are kept in the work folder, and students that
the JSON file holds already stay there, whatever the folder is. `of_teacher` of a student is the fingerprint of its teacher's weights. All students of a run have one teacher and one stored draw of noise, so that an interval over seeds is one over
students alone; `--teacher-seed` gives another teacher (first weights, order of the walks) and another seed of the noise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import grid
import student
import teacher
import torch

import stillhouse

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "proof"))
from origin import machine, marked
from page_parts import T95

PASSES = [1, 2, 4, 8, 16]
PAPER = {"mdlm": [53.0, 64.0, 69.0, 81.0, 94.0], "gumbel": [82.0, 86.0, 97.0, 99.0, 98.0]}
"""Success rates of Table 7, in %, of 100 paths each."""


BEFORE = {"teacher_seed": 0, "teacher_epochs": 100}
"""Of results from before there was a choice, or it was kept."""


def schedule_of(args: argparse.Namespace) -> str:
    return grid.CONSTANT if args.constant_rate else grid.COSINE


def prepare(args: argparse.Namespace) -> None:
    """Walks, teacher, data set: what is not there yet."""
    work = args.work
    work.mkdir(parents=True, exist_ok=True)
    how = grid.Training(
        2 * args.layers, args.width // 16, args.width, args.teacher_epochs, lr=args.lr, schedule=schedule_of(args)
    )
    mine, asked = work / "teacher.json", {"seed": args.teacher_seed, **asdict(how)}
    there = (work / "teacher/tokenizer.json").exists()
    held = (json.loads(mine.read_text()) if mine.exists() else {}) if there else asked
    if held != asked:
        raise SystemExit(
            f"{work} holds a teacher of {held or 'unknown settings'}, asked was {asked}; valid: another --work, or the same settings"
        )
    mine.write_text(json.dumps(asked))
    texts = [grid.text_of(walk) for walk in grid.walks()[: grid.PATHS]]
    (work / "walks.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if not there:
        ids = {word: i for i, word in enumerate(grid.VOCABULARY)}
        rows = torch.tensor([[grid.BOS, *(ids[word] for word in text.split()), grid.EOS] for text in texts])
        teacher.train(rows, work / "teacher", how, seed=args.teacher_seed)
    job = (HERE / "job.yaml").read_text()
    (work / "job.yaml").write_text(job.replace("\nseed: 1\n", f"\nseed: {1 + args.teacher_seed}\n"))
    subprocess.run([args.program, "run", work / "job.yaml"], check=True)


def noise_of(variant: str, work: pathlib.Path, seed: int) -> student.Noise | None:
    if variant == "mdlm":
        return None
    if variant.startswith("stored"):
        return student.stored(int(variant.split()[1]), seed)
    whole = stillhouse.open(work / "dataset")[:]
    p = teacher.probabilities(work / "teacher", torch.from_numpy(whole["input_ids"]).long()).double()
    place = {int(number): row for row, number in enumerate(whole["sequence_id"])}
    return student.fresh(p, place, seed)


@dataclass(frozen=True)
class Task:
    """One student."""

    work: pathlib.Path
    variant: str
    seed: int
    paths: int
    passes: list[int]
    how: grid.Training

    def file(self) -> pathlib.Path:
        """Where its result is kept: under its name and all that it depends on."""
        key = hashlib.sha256(json.dumps([asdict(self.how), self.paths, self.passes]).encode()).hexdigest()[:8]
        return self.work / "students" / f"{self.variant.replace(' ', '-')}-{self.seed}-{key}.json"

    def run(self) -> dict[str, Any]:
        """Its result, of which a copy is kept."""
        if not self.file().exists():
            made = self.made()
            self.file().parent.mkdir(exist_ok=True)
            new = self.file().with_suffix(".new")
            new.write_text(json.dumps(made))
            os.replace(new, self.file())
        result: dict[str, Any] = json.loads(self.file().read_text())
        return result

    def made(self) -> dict[str, Any]:
        """Trains it, and counts its valid paths by passes. On one thread, so that the result does not depend on the cores."""
        began = time.monotonic()
        torch.set_num_threads(1)
        noise = noise_of(self.variant, self.work, self.seed)
        model, curve = student.train(str(self.work / "dataset"), noise, self.how, self.seed)
        hits = [success(student.generate(model, self.paths, passes, 100 + self.seed)) for passes in self.passes]
        return {
            "variant": self.variant, "seed": self.seed, "hits": hits, "loss": [round(loss, 4) for loss in curve],
            "seconds": round(time.monotonic() - began), "of_teacher": fingerprint(self.work),
        }  # fmt: skip


def fingerprint(work: pathlib.Path) -> str:
    """Of the teacher's weights."""
    return hashlib.sha256((work / "teacher/model.safetensors").read_bytes()).hexdigest()[:12]


def success(rows: torch.Tensor) -> int:
    return sum(grid.is_valid(row) for row in rows.tolist())


def interval(of_seeds: list[float]) -> tuple[float, float]:
    """Mean and half of the 95 % interval of a mean over seeds (Student's t)."""
    n = len(of_seeds)
    mean = sum(of_seeds) / n
    if n == 1:
        return mean, math.nan
    return mean, T95.get(n, 1.96 + 2.6 / (n - 1)) * math.sqrt(sum((x - mean) ** 2 for x in of_seeds) / (n - 1) / n)


def kept(args: argparse.Namespace, how: grid.Training) -> dict[str, Any]:
    """What the JSON file holds already of the same settings; students of others are refused."""
    asked = {
        "paths": args.paths, "training": asdict(how), "passes": args.passes, "teacher_seed": args.teacher_seed,
        "teacher_epochs": args.teacher_epochs,
    }  # fmt: skip
    if args.json and args.json.exists():
        found: dict[str, Any] = json.loads(args.json.read_text())
        held = {name: found.get(name, BEFORE.get(name)) for name in asked}
        if held != asked:
            raise SystemExit(
                f"{args.json} holds students of {held}, asked were {asked}; valid: another file, or the same settings"
            )
        return found
    return {
        "experiment": "maze", **asked, "seeds": 0, "teachers": {}, "paper": PAPER, "seconds": 0, "jobs": args.jobs,
        "machine": machine(1), "students": [],
    }  # fmt: skip


def experiment(args: argparse.Namespace) -> dict[str, Any]:
    """All students of all seeds, as many at once as there are cores."""
    began = time.monotonic()
    # threads of products so small wait for each other more than they work; and so a teacher does not depend on the cores
    torch.set_num_threads(1)
    heads = max(1, args.width // 32)
    how = grid.Training(args.layers, heads, args.width, args.epochs, lr=args.lr, schedule=schedule_of(args))
    result = kept(args, how)
    prepare(args)
    of_teacher = success(teacher.walk(args.work / "teacher", args.paths, seed=1))
    print(f"teacher: {of_teacher} of {args.paths} paths are valid", flush=True)
    result["teachers"] = {**result.get("teachers", {}), fingerprint(args.work): of_teacher}
    there = {(done["variant"], done["seed"]) for done in result["students"]}
    tasks = [
        Task(args.work, variant, seed, args.paths, args.passes, how)
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for variant in args.variants
        if (variant, seed) not in there
    ]
    if tasks:
        marked(result)
    before = result["seconds"]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(Task.run, tasks):
            result["students"].append(done)
            result["seconds"] = before + round(time.monotonic() - began)
            result["seeds"] = len({done["seed"] for done in result["students"]})
            if args.json:  # after each student: a run of hours that is stopped leaves what it has
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
            shown = " ".join(f"{100 * hits / args.paths:5.1f}" for hits in done["hits"])
            print(f"seed {done['seed']}  {done['variant']:10} {shown}   {result['seconds']} s", flush=True)
    return result


def table(result: dict[str, Any]) -> str:
    """The table of a person: success in %, mean over seeds ± 95 % interval."""
    lines = ["student      " + "".join(f"{f'NFE {n}':>14}" for n in result["passes"])]
    for variant in dict.fromkeys(done["variant"] for done in result["students"]):
        rates = [done["hits"] for done in result["students"] if done["variant"] == variant]
        cells = [interval([100 * hits[i] / result["paths"] for hits in rates]) for i in range(len(result["passes"]))]
        lines.append(f"{variant:13}" + "".join(f"{mean:7.1f} ± {half:4.1f}" for mean, half in cells))
    lines += [
        f"paper {name:7}" + "".join(f"{rate:7.1f}       " for n, rate in zip(PASSES, rates) if n in result["passes"])
        for name, rates in PAPER.items()
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--work", type=pathlib.Path, required=True, help="folder for the walks, the teacher and the data set"
    )
    parser.add_argument("--program", default="stillhouse", help="the stillhouse program")
    parser.add_argument("--seeds", type=int, default=5, help="of students, how many")
    parser.add_argument("--first-seed", type=int, default=0, help="of students, the first")
    parser.add_argument("--teacher-seed", type=int, default=0, help="of the teacher and of the stored noise")
    parser.add_argument(
        "--paths", type=int, default=1000, help="paths that each student generates for each number of passes"
    )
    parser.add_argument("--passes", type=int, nargs="+", default=PASSES, help="numbers of passes (NFE)")
    parser.add_argument("--epochs", type=int, default=100, help="of the students")
    parser.add_argument("--teacher-epochs", type=int, default=100)
    parser.add_argument("--variants", nargs="+", default=["mdlm", "stored 1", "fresh"], help="also: stored 16")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4, help="of the students; the teacher has twice as many")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument(
        "--constant-rate",
        action="store_true",
        help="no warm-up and no decay, for students and teacher: as the paper trains",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="students that are trained at once")
    parser.add_argument("--json", type=pathlib.Path, help="where the raw results go")
    args = parser.parse_args(argv)
    result = experiment(args)
    print(table(result))
    return result


if __name__ == "__main__":
    main()
