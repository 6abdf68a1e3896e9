"""Times the program beside its peers, on the same bytes and the same cores; tables on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import forward, machine, models, noise, processes, rounds, tokenizing, writing

ROOT = Path(__file__).resolve().parents[2]
SPEECHES = ROOT / "assets" / "corpus" / "sotu-small.jsonl.gz"
CACHE = ROOT / ".cache" / "peers"
PARTS = ("tokenize", "forward", "noise", "write")


def shape(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    return int(batch), int(length)


def arguments() -> argparse.Namespace:
    """With what `--quick` and the machine decide filled in."""
    parser = argparse.ArgumentParser(prog="research/bench-peers", description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="these parts only")
    parser.add_argument("--rounds", type=int, help="how often every side is run, in turn; 3, quick 1")
    parser.add_argument("--quick", action="store_true", help="one round of less of everything")
    parser.add_argument(
        "--patience",
        type=float,
        default=30,
        help="seconds to wait before a run for others to leave the cores alone; 30",
    )
    parser.add_argument("--tries", type=int, default=3, help="how often a run is made while others disturb it; 3")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores of every side; all")
    parser.add_argument("--megabytes", type=float, help="of jsonl to tokenize; 43.2, quick 10.8")
    parser.add_argument("--corpus", type=Path, default=SPEECHES, help="a .jsonl.gz with `text`, repeated to that size")
    parser.add_argument("--dtypes", nargs="+", default=["f32", "f16", "bf16"], help="types of our teacher")
    parser.add_argument(
        "--shapes", type=shape, nargs="+", help="BATCHxLENGTH of the forward pass; 4x256 1x1024 8x1024, quick 4x256"
    )
    parser.add_argument("--threads", type=int, nargs="+", help="threads of the forward pass; 1 and all cores")
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens that SmolLM2 makes noise for; 20,480, quick 4,096 (the nano teacher four times as many)",
    )
    parser.add_argument(
        "--texts", type=int, help="texts of 256 tokens that SmolLM2 writes, at least one for each slot; 32, quick 8"
    )
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[1, 8, 32], help="texts that are written at once; 1 8 32"
    )
    parser.add_argument(
        "--target", type=Path, default=ROOT / "target" / "release", help="folder with our programs; target/release"
    )
    parser.add_argument("--json", type=Path, help="also writes every run here")
    args = parser.parse_args()
    for name, usual, quick in (
        ("rounds", 3, 1),
        ("megabytes", 43.2, 10.8),
        ("shapes", [(4, 256), (1, 1024), (8, 1024)], [(4, 256)]),
        ("tokens", 20_480, 4_096),
        ("texts", 32, 8),
    ):
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else usual)
    args.threads = args.threads or sorted({1, args.cores})
    return args


class Report:
    """Tables as they come, and everything for `--json`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sections: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    def compare(self, title: str, part: Any, sides: list[rounds.Side], base: str | None = None) -> None:
        """Takes the sides in turn and prints their table; `part` has the figures, the rate and the note of that table."""
        rounds.in_turn(title, sides, self.args.rounds, self.args.patience, self.args.tries)
        print(f"\n### {title}\n\n{rounds.table(sides, part.FIGURES, part.RATE, base)}\n\n{part.NOTE}", flush=True)
        self.sections.append({"title": title, "sides": rounds.as_json(sides)})
        self.wrong += [f"{title}, {side.name}: {side.failure}" for side in sides if side.failed]

    def left_out(self, title: str, why: str) -> None:
        print(f"\n### {title}\n\nLeft out: {why}", flush=True)
        self.sections.append({"title": title, "left_out": why})

    def check(self, title: str, problem: str | None) -> None:
        if problem:
            self.wrong.append(f"{title}: {problem}")
            print(f"\n**{problem}**")
        else:
            print("\nThe tokens of all sides that ran are equal.")


def main() -> None:
    args, about = arguments(), machine.describe()
    report = Report(args)
    program, prefill = args.target / "stillhouse", args.target / "examples" / "prefill"
    for path in (program, prefill):
        if not path.exists():
            raise SystemExit(f"bench-peers: {path} is not there; research/bench-peers builds it")
    CACHE.mkdir(parents=True, exist_ok=True)
    teachers = []
    if {"forward", "noise", "write"} & set(args.only):
        teachers = [models.smollm2(ROOT, CACHE, args.cores), models.nano(ROOT)]
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="work-") as folder:
        work = Path(folder)
        if "tokenize" in args.only:
            corpus = tokenizing.corpus(args.corpus, CACHE, args.megabytes)
            sides = tokenizing.sides(program, ROOT / "assets", corpus, work, args.cores)
            title = f"GPT-2, {args.megabytes:g} MB of jsonl to packed tokens, {args.cores} cores"
            report.compare(title, tokenizing, sides)
            report.check(title, tokenizing.unequal(sides))
        for teacher in teachers if "forward" in args.only else []:
            small = teacher.name.startswith("nano")
            for batch, length in args.shapes:
                for threads in args.threads:
                    dtypes = ["f32"] if small else args.dtypes
                    sides = forward.sides(prefill, teacher, (batch, length), threads, dtypes)
                    title = f"{teacher.name}, forward pass, {batch} × {length}, {threads} thread{'s' * (threads > 1)}"
                    report.compare(title, forward, sides, "ours, f32")
        for teacher in teachers if "noise" in args.only else []:
            small = teacher.name.startswith("nano")
            title = f"{teacher.name}, posterior noise end to end, {args.cores} cores"
            if teacher.job_teacher is None:
                report.left_out(
                    title, "the weights are random, noise of them says nothing; scripts/fetch-assets fetches the others"
                )
                continue
            tokens, dtypes = (4 * args.tokens, ["f32"]) if small else (args.tokens, args.dtypes)
            sides = noise.sides(program, teacher, SPEECHES, work, args.cores, tokens, dtypes)
            report.compare(title, noise, sides, "ours, f32")
            report.check(title, noise.unequal(sides))
        for slots in args.slots if "write" in args.only else []:
            smollm2 = teachers[0]
            title = f"{smollm2.name} writes, {slots} texts of {writing.LENGTH} at once, {args.cores} cores"
            if smollm2.job_teacher is None:
                report.left_out(
                    title, "there is no tokenizer beside random weights; scripts/fetch-assets fetches the others"
                )
                continue
            sides = writing.sides(program, smollm2, work, args.cores, slots, max(slots, args.texts), args.dtypes)
            report.compare(title, writing, sides, "ours, f16")
    about["load_at_end"] = machine.load()
    print(
        f"\nMedians of {args.rounds} runs (of those in which others had less than {processes.QUIET_CORES} cores, where there are such), "
        f"each a process of its own, all sides in turn. {machine.line(about)}"
    )
    if args.json:
        args.json.write_text(
            json.dumps({"machine": about, "sections": report.sections, "wrong": report.wrong}, indent=1)
        )
    if report.wrong:
        print("\n".join(report.wrong), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except processes.SideFailed as failed:  # what all sides need: the models, the text
        raise SystemExit(f"bench-peers: {failed}") from failed
