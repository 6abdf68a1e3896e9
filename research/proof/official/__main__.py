"""Runs the comparisons: ``python -m official --theirs FOLDER`` in research/proof, or ``make official THEIRS=FOLDER``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from . import compare, theirs
from .compare import Comparison
from .data import ROOT, Data
from .mutations import MUTATIONS

PAPERS = ("mdlm", "bd3lm", "gumbel", "prime", "pgm", "medusa", "armd", "exports")


def comparisons(root: pathlib.Path, data: Data, papers: tuple[str, ...] = PAPERS) -> Iterator[Comparison]:
    """All of them."""
    for paper in papers:
        yield from importlib.import_module(f"official.{paper}").comparisons(root, data)


def judged(root: pathlib.Path, data: Data, papers: tuple[str, ...]) -> list[dict[str, Any]]:
    """Each, with whether one wrong entry of ours would be seen."""
    made = []
    for comparison in comparisons(root, data, papers):
        made.append({**comparison.judged(), "one_wrong_entry_seen": compare.caught(comparison)})
        print(f"{made[-1]['verdict']:<13} {made[-1]['name']}  ({made[-1]['relative']})", flush=True)
    return made


def mutated(
    root: pathlib.Path, data: Data, papers: tuple[str, ...], before: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Every mistake of ours that was made on purpose, and the comparisons that see it."""
    made = []
    for mutation in MUTATIONS:
        if mutation.paper not in papers:
            continue
        with mutation.made():
            after = [comparison.judged() for comparison in comparisons(root, data, (mutation.paper,))]
        was = {of["name"]: of["verdict"] for of in before}
        seen = [of["name"] for of in after if of["verdict"] != was[of["name"]]]
        made.append({"mistake": mutation.what, "seen_by": seen})
        print(f"{'seen' if seen else 'NOT SEEN':<13} {mutation.what}: {', '.join(seen)}", flush=True)
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="official", description=__doc__)
    parser.add_argument("--theirs", type=pathlib.Path, help="folder with the checkouts, see --list")
    parser.add_argument("--list", action="store_true", help="say which checkouts are needed, and where")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "docs/proof/official.json")
    parser.add_argument("--work", type=pathlib.Path, help="keep our data sets here")
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "target/debug/stillhouse")
    parser.add_argument(
        "--papers", nargs="+", default=PAPERS, choices=PAPERS, help="only these; nothing is written then"
    )
    args = parser.parse_args(argv)
    if args.list:
        for repository in theirs.REPOSITORIES:
            print(
                f"git clone https://github.com/{repository.name} {repository.folder} && git -C {repository.folder} checkout {repository.commit}"
            )
        return 0
    if args.theirs is None:
        parser.error("--theirs: missing, valid: a folder with the checkouts that --list names")
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        data, papers = Data(args.work or pathlib.Path(temporary), args.program), tuple(args.papers)
        found = judged(args.theirs, data, papers)
        mistakes = mutated(args.theirs, data, papers, found)
    made = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "seconds": round(time.monotonic() - began),
        "repositories": [{"paper": r.paper, "name": r.name, "commit": r.commit} for r in theirs.REPOSITORIES],
        "without_code": [
            {"paper": paper, "code": None, "looked": looked} for paper, looked in theirs.WITHOUT_CODE.items()
        ],
        "comparisons": found,
        "mistakes": mistakes,
    }
    if papers == PAPERS:
        args.json.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    bad = [of["name"] for of in found if of["verdict"] == "contradiction" or not of["one_wrong_entry_seen"]]
    bad += [of["mistake"] for of in mistakes if not of["seen_by"]]
    print(f"{len(found)} comparisons, {len(mistakes)} mistakes; not as it should be: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
