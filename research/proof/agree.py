"""Whether two runs of the experiments agree: every figure of every student, from the results of both.

    python agree.py docs/proof demo-out/proof --only maze                   # what `make maze` says
    python agree.py docs/proof demo-out/proof --only maze --publish         # and puts the second run's file into the first folder
    python agree.py docs/proof docs/proof/second --json docs/proof/agreement.json   # what the page shows

A figure is a number of a student (a loss, a rate, a perplexity; losses of single batches count as their mean), its values are those of the seeds. Equal: all
seeds that both runs have gave the same value to the last digit. Else both means have to lie within the 95 % interval of their difference (Welch's t over seeds); of
one seed alone there is no interval, and such a figure is counted as unknown. Figures and files that one run lacks are named; with `--json` a comparison that the file
holds of results that the second run lacks stays there, marked `before`. The exit status is 1 where more
figures lie outside than chance explains (and nothing is published).
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from page_parts import T95

NO_FIGURES = (
    "seed", "curve", "loss", "targets", "parameters", "machine", "of_teacher", "texts", "window_tokens", "stride_tokens",
)  # fmt: skip
"""What of a student is no figure of a table; times are left out by their name."""
OF_BATCHES = ("validation", "batches", "shown")
"""Lists under these names are of batches of rows: their figure is the mean."""
BESIDE = ("corpus", "tolerances", "idle_step_ratio", "of_the_perfect")
"""Figures that are of no student: there is one value of each."""
SETTINGS = ("training", "paths", "passes")
"""What has to be the same for figures to be comparable."""
CONSTANT = "constant rate"
"""As research/maze/grid.py names it."""
EXPECTED = 0.05
"""The share of figures outside of a 95 % interval where nothing but chance is at work."""

Figures = dict[tuple[str, str], dict[int, float]]
"""The values by seed of (student, figure)."""


def numbers(of: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a tree, with the way to each."""
    if isinstance(of, Mapping):
        for key, inner in of.items():
            if key not in NO_FIGURES and not key.startswith("seconds"):
                yield from numbers(inner, f"{path}.{key}" if path else key)
    elif isinstance(of, list) and of and path.split(".")[0] in OF_BATCHES:
        yield path, sum(of) / len(of)
    elif isinstance(of, list):
        for i, inner in enumerate(of):
            yield from numbers(inner, f"{path}.{i}")
    elif isinstance(of, (int, float)) and not isinstance(of, bool):
        yield path, float(of)


def figures(found: Mapping[str, Any]) -> Figures:
    made: Figures = {}
    for student in found["students"]:
        name = str(student.get("student", student.get("variant")))
        for path, value in numbers(student):
            made.setdefault((name, path), {})[int(student["seed"])] = value
    for beside in BESIDE:
        for path, value in numbers(found.get(beside, {})):
            made[(beside, path)] = {0: value}
    return made


def within(ones: Sequence[float], others: Sequence[float]) -> bool | None:
    """Whether two means agree within the 95 % interval of their difference; None where there is no interval."""
    if min(len(ones), len(others)) < 2:
        return None
    shares = []
    for values in (ones, others):
        mean = sum(values) / len(values)
        shares.append((sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values), len(values)))
    error = sum(share for share, _ in shares)
    apart = abs(sum(ones) / len(ones) - sum(others) / len(others))
    if error == 0:
        return apart == 0
    freedom = error**2 / sum(share**2 / (n - 1) for share, n in shares)
    return apart <= T95.get(max(2, 1 + math.floor(freedom)), 1.96 + 2.6 / freedom) * math.sqrt(error)


def compared(ones: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """How many figures are equal, agree, do not, or have one seed alone on a side; which do not; which one run lacks."""
    a, b = figures(ones), figures(others)
    counts = {"equal": 0, "within": 0, "outside": 0, "unknown": 0}
    outside, differ = [], 0
    for key in sorted(a.keys() & b.keys()):
        seeds = a[key].keys() & b[key].keys()
        if seeds and all(a[key][seed] == b[key][seed] for seed in seeds):
            counts["equal"] += 1
            continue
        differ += key[0] not in BESIDE and any(a[key][seed] != b[key][seed] for seed in seeds)
        agree = within(list(a[key].values()), list(b[key].values()))
        counts["unknown" if agree is None else "within" if agree else "outside"] += 1
        if agree is False:
            outside.append(" ".join(key))
    return {
        "figures": len(a.keys() & b.keys()), **counts, "which": outside, "shared_differ": differ,
        "lacking": [[" ".join(key) for key in sorted(one.keys() - other.keys())] for one, other in ((b, a), (a, b))],
        "seeds": [sorted({student["seed"] for student in found["students"]}) for found in (ones, others)],
        "runs": [{name: found.get(name) for name in ("made", "machine", "teacher_seed", "noise_seed", "teachers")} for found in (ones, others)],
    }  # fmt: skip


def setting(found: Mapping[str, Any], key: str) -> Any:
    """A setting; mazes from before there was a choice of schedules have a constant rate."""
    of = found.get(key)
    return {"schedule": CONSTANT, **of} if key == "training" and found.get("experiment") == "maze" else of


def disagrees(of: Mapping[str, Any]) -> bool:
    """Whether more figures lie outside of their intervals than chance explains."""
    judged = int(of["within"]) + int(of["outside"])
    return int(of["outside"]) > max(1.0, 2 * EXPECTED * judged)


def all_of(first: pathlib.Path, second: pathlib.Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """Every file of results that either folder holds: compared, or why not."""
    files, not_compared = {}, {}
    names = {file.stem for folder in (first, second) for file in folder.glob("*.json")}
    for name in sorted(name for name in names if not only or name in only):
        there = [folder / f"{name}.json" for folder in (first, second)]
        held = [json.loads(file.read_text()) if file.exists() else None for file in there]
        if not any(found and found.get("students") for found in held):
            continue
        ones, others = held
        if ones is None or others is None:
            not_compared[name] = f"{'first' if ones is None else 'second'} run: no such file"
        elif not ones.get("students") or not others.get("students"):
            not_compared[name] = f"{'second' if ones.get('students') else 'first'} run: no students"
        elif other := [key for key in SETTINGS if setting(ones, key) != setting(others, key)]:
            of = other[0]
            not_compared[name] = f"other settings: {of} of the first run {ones.get(of)}, of the second {others.get(of)}"
        else:
            files[name] = compared(ones, others)
    return {"experiment": "agreement", "files": files, "not_compared": not_compared}


def told(name: str, of: Mapping[str, Any]) -> str:
    """The agreement of a file as a person reads it."""
    words = (
        f"{name}: of {of['figures']} figures {of['equal']} are equal, {of['within']} agree within their 95 % intervals, {of['outside']} do not, "
        f"{of['unknown']} have one seed alone (seeds {of['seeds'][0]} and {of['seeds'][1]})"
    )
    lines = [words, *(f"  outside: {which}" for which in of["which"])]
    for run, lacking in zip(("first", "second"), of["lacking"]):
        if lacking:
            lines.append(
                f"  the {run} run lacks {len(lacking)} figures: {', '.join(lacking[:4])}{', …' * (len(lacking) > 4)}"
            )
    if disagrees(of):
        lines.append(f"  more than chance explains: {name} does not agree")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("first", type=pathlib.Path, help="folder of results")
    parser.add_argument("second", type=pathlib.Path, help="the same files of another run")
    parser.add_argument("--only", nargs="+", default=[], help="names of results, without .json")
    parser.add_argument("--json", type=pathlib.Path, help="where the comparison goes")
    parser.add_argument("--publish", action="store_true", help="then copy the second run's files into the first folder")
    args = parser.parse_args(argv)
    lacking = [name for name in args.only if not (args.second / f"{name}.json").exists()]
    if not list(args.second.glob("*.json")) or lacking:
        parser.error(f"{args.second}: got no {' '.join(lacking) or 'results'}, valid: a folder of JSON files of a run")
    result = all_of(args.first, args.second, args.only)
    for name, of in result["files"].items():
        print(told(name, of), flush=True)
    for name, why in result["not_compared"].items():
        print(f"{name}: not compared, {why}", flush=True)
    if args.json:
        before = json.loads(args.json.read_text())["files"] if args.json.exists() else {}
        for name in sorted(
            result["not_compared"].keys() & before.keys()
        ):  # the second run of then is not at hand any more
            result["files"][name] = {**before[name], "before": True}
            del result["not_compared"][name]
        result["files"] = dict(sorted(result["files"].items()))
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.publish:
        for name in [*result["files"], *result["not_compared"]]:
            if (args.second / f"{name}.json").exists():
                shutil.copy(args.second / f"{name}.json", args.first / f"{name}.json")
                print(f"{name}: published in {args.first}", flush=True)
    return int(not args.publish and any(disagrees(of) for of in result["files"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
