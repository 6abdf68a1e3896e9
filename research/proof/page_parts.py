"""What the pages of proofs are made of: means and intervals, tables, runs, and the page itself."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from page_plot import Plot, Points
from page_wrap import wrapped

if TYPE_CHECKING:
    from page_trends import Trend

ROOT = pathlib.Path(__file__).resolve().parents[2]
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 11: 2.228, 12: 2.201}
"""Student's t: the 97.5 % quantile of a mean of so many values."""


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """A mean and half of its 95 % interval; of one value the interval is unknown (NaN)."""
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, math.nan
    spread = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n)
    return mean, T95.get(n, 1.96 + 2.6 / (n - 1)) * spread


def shown(values: Sequence[float], digits: int, sign: bool = False) -> str:
    """A mean ± half of its 95 % interval; nothing for no values."""
    if not values:
        return ""
    mean, half = mean_and_half(values)
    plus = "+" if sign else ""
    return f"{mean:{plus},.{digits}f}" if math.isnan(half) else f"{mean:{plus},.{digits}f} ± {half:,.{digits}f}"


def mean_of(batches: Sequence[float], targets: Sequence[int]) -> float:
    """The mean over all targets of losses that are means of batches."""
    return sum(loss * count for loss, count in zip(batches, targets, strict=True)) / sum(targets)


def over_seeds(of_seeds: Sequence[Sequence[float]], targets: Sequence[int], digits: int, sign: bool = False) -> str:
    """A mean ± half of its 95 % interval, of batches of the same rows for each seed.

    The rows are the same for all seeds, so batches of two seeds are not independent: there is one mean of each seed,
    and the interval is over these. Of one seed there is only the interval over its batches, marked "(rows)".
    """
    if len(of_seeds) != 1:
        return shown([mean_of(batches, targets) for batches in of_seeds], digits, sign)
    (batches,) = of_seeds
    mean, n = mean_of(batches, targets), len(batches)
    plus = "+" if sign else ""
    if n == 1:
        return f"{mean:{plus}.{digits}f}"
    # a ratio of sums: what each batch's sum is off from the mean times its targets
    off = [(loss - mean) * count * n / sum(targets) for loss, count in zip(batches, targets)]
    half = T95.get(n, 1.96 + 2.6 / (n - 1)) * math.sqrt(sum(x * x for x in off) / (n - 1) / n)
    return f"{mean:{plus}.{digits}f} ± {half:.{digits}f} (rows)"


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate, in %."""
    z, p = 1.96, hits / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    low, high = ((middle + sign * half) / (1 + z * z / of) for sign in (-1, 1))
    return 100 * low, 100 * high


def binomial(hits: int, of: int) -> str:
    """A rate in % with Wilson's 95 % interval."""
    low, high = wilson(hits, of)
    return f"{100 * hits / of:.1f} ({low:.1f} to {high:.1f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def machine_of(found: Any) -> str:
    """The machine of a result."""
    of = found["machine"]
    return f"{of.get('model', of['processor'])}, {counted(of['cores'], 'core')}, torch {of['torch']}"


def made_of(found: Any) -> str:
    """Commit and day of a result, as far as it has them."""
    return "; ".join(f"{of['commit']}{' of ' + of['date'] if of['date'] else ''}" for of in found.get("made") or [])


def run_of(file: str, command: str, found: Any) -> list[str]:
    """A result of students as a line of the table of runs."""
    students = found["students"]
    machine = found.get("machine") or next((done["machine"] for done in students if "machine" in done), None)
    timed = [done["seconds"] for done in students if done.get("seconds") is not None]
    return [
        f"`{file}`",
        f"`{command}`",
        str(len(students)),
        f"{sum(timed):,.0f} s",
        machine_of({"machine": machine}) if machine else "not recorded",
        made_of(found) or "not recorded",
    ]


def of_students(students: Sequence[Any], key: str) -> dict[str, list[Any]]:
    """Students by their name, in the order in which they came."""
    names = dict.fromkeys(done[key] for done in students)
    return {name: [done for done in students if done[key] == name] for name in names}


def by_seed(ones: Sequence[Any], others: Sequence[Any], key: str) -> list[float]:
    """Differences of two students' results with the same seed."""
    of = {done["seed"]: done[key] for done in others}
    return [done[key] - of[done["seed"]] for done in ones if done["seed"] in of]


def curves(by: Mapping[str, Sequence[Any]]) -> dict[str, Points]:
    """The mean at each measured step over the seeds whose curve was kept."""
    made: dict[str, Points] = {}
    for name, those in by.items():
        kept = [done["curve"] for done in those if "curve" in done]
        if kept:
            made[name] = [
                (float(step), sum(curve[i][1] for curve in kept) / len(kept)) for i, (step, _) in enumerate(kept[0])
            ]
    return made


@dataclass(frozen=True)
class Claim:
    """A line of the first table of docs/PROOF.md."""

    claim: str
    evidence: str
    verdict: str
    caveat: str


RUN_HEAD = ("result", "command", "students", "time", "machine", "commit")


class Page:
    """A page of details as it grows, and the plots beside it."""

    def __init__(self, results: pathlib.Path, page: pathlib.Path) -> None:
        self.results, self.page = results, page
        self.title = self.about = ""
        self.introduction: list[str] = []
        self.first: list[str] = []
        self.contradictions: list[str] = []
        self.parts: list[str] = []
        self.runs: list[list[str]] = []
        self.trends: list[Trend] = []
        self.plots: dict[str, Plot] = {}
        self.claim: Claim | None = None

    def read(self, name: str) -> Any:
        file = self.results / name
        return json.loads(file.read_text()) if file.exists() else None

    def begin(self, title: str, about: str, *introduction: str) -> None:
        """``about``: what the page holds, in the index of docs/PROOF.md."""
        self.title, self.about, self.introduction = title, about, list(introduction)

    def say(self, *parts: str) -> None:
        self.parts += parts

    def missing(self, what: str, command: str) -> None:
        self.say(f"**Missing:** docs/proof has no {what}. `{command}` makes it.")

    def warn(self, line: str) -> None:
        """What the page tells before its results: what contradicts a paper or our documents, and what is missing."""
        self.first.append(line)

    def contradict(self, line: str) -> None:
        """What docs/PROOF.md lists, too: a paper's result that ours contradicts."""
        self.contradictions.append(line)

    def plot(self, name: str, what: str, plot: Plot) -> None:
        self.plots[name] = plot
        self.say(f"![{what}]({name})")

    def text(self) -> str:
        """The page in Markdown."""
        up = pathlib.PurePath(os.path.relpath(self.page, self.results)).as_posix()
        parts = [f"# {self.title}", *self.introduction, f"Summary of all experiments: [{self.page.name}]({up})."]
        if self.first:
            parts += ["## Contradictions and limits", "\n".join(f"- {line}" for line in self.first)]
        parts += self.parts
        if self.runs:
            note = ["Time is the sum over all students, of one thread each, unless the students column says otherwise."]
            parts += ["## Runs", *(note if any(run[2] for run in self.runs) else []), table(RUN_HEAD, self.runs)]
        return document(parts)


def document(parts: Sequence[str]) -> str:
    """Parts as a Markdown file."""
    generated = (
        "<!-- Generated by research/proof/page.py from docs/proof/*.json. Edit the code, then run `make proof`. -->"
    )
    return "\n\n".join([generated, *(wrapped(part) for part in parts)]) + "\n"
