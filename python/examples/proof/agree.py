"""Whether two runs of the experiments agree: every figure of every student, from the results of both.

    python agree.py docs/proof OTHER/docs/proof --json docs/proof/agreement.json

A figure is a number of a student (a loss, a rate, a perplexity), its values are those of the seeds. Equal: the same students have the same values to the last digit. Else
both means have to lie within the 95 % interval of their difference (Welch's t over seeds); of one seed alone there is no interval, and only equality is asked for.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from page_parts import T95

NO_FIGURES = ("seed", "curve", "loss", "targets", "parameters", "machine", "of_teacher")
"""What of a student is no figure of a table; times are left out by their name."""

Figures = dict[tuple[str, str], dict[int, float]]
"""The values by seed of (student, figure)."""


def numbers(of: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a tree, with the way to each."""
    if isinstance(of, Mapping):
        for key, inner in of.items():
            if key not in NO_FIGURES and not key.startswith("seconds"):
                yield from numbers(inner, f"{path}.{key}" if path else key)
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
    """How many figures are equal, agree, do not, or have one seed alone on a side; which do not."""
    a, b = figures(ones), figures(others)
    counts = {"equal": 0, "within": 0, "outside": 0, "unknown": 0}
    outside = []
    for key in sorted(a.keys() & b.keys()):
        seeds = a[key].keys() & b[key].keys()
        if seeds and all(a[key][seed] == b[key][seed] for seed in seeds):
            counts["equal"] += 1
            continue
        agree = within(list(a[key].values()), list(b[key].values()))
        counts["unknown" if agree is None else "within" if agree else "outside"] += 1
        if agree is False:
            outside.append(" ".join(key))
    seeds_of = [len({student["seed"] for student in found["students"]}) for found in (ones, others)]
    return {"figures": len(a.keys() & b.keys()), **counts, "which": outside, "seeds": seeds_of}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("first", type=pathlib.Path, help="folder of results")
    parser.add_argument("second", type=pathlib.Path, help="the same files of another run")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    result = {}
    for file in sorted(args.second.glob("*.json")):
        first = args.first / file.name
        if not first.exists():
            parser.error(f"{first}: not there, valid: results of both runs; {file} is")
        ones, others = json.loads(first.read_text()), json.loads(file.read_text())
        if "students" not in others:
            continue
        if ones["training"] != others["training"]:
            parser.error(f"{file}: students of {others['training']}, {first} holds those of {ones['training']}")
        result[file.stem] = compared(ones, others)
        print(file.stem, result[file.stem], flush=True)
    if not result:
        parser.error(f"{args.second}: no results of students")
    args.json.write_text(json.dumps({"experiment": "agreement", "files": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
