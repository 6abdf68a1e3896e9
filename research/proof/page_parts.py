"""What the parts of the page of proofs are made of: means and intervals, tables, plots."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLOURS = ["#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b", "#555555", "#00897b", "#d81b60"]
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 11: 2.228, 12: 2.201}
"""Student's t: the 97.5 % quantile of a mean of so many values."""

Points = Sequence[tuple[float, float]]


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
    return f"{mean:{plus}.{digits}f}" if math.isnan(half) else f"{mean:{plus}.{digits}f} ± {half:.{digits}f}"


def mean_of(batches: Sequence[float], targets: Sequence[int]) -> float:
    """The mean over all targets of losses that are means of batches."""
    return sum(loss * count for loss, count in zip(batches, targets, strict=True)) / sum(targets)


def over_seeds(of_seeds: Sequence[Sequence[float]], targets: Sequence[int], digits: int, sign: bool = False) -> str:
    """A mean ± half of its 95 % interval, of batches of the same rows for each seed.

    The rows are the same for all seeds, so that batches of two seeds are not independent: there is one mean of each seed, and the interval is over these. Of one
    seed there is only the one over its batches, and "(rows)" says so.
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


def binomial(hits: int, of: int) -> str:
    """A rate in % with Wilson's 95 % interval."""
    z, p = 1.96, hits / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    low, high = ((middle + sign * half) / (1 + z * z / of) for sign in (-1, 1))
    return f"{100 * p:.1f} ({100 * low:.1f} to {100 * high:.1f})"


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


def ran(found: Any) -> str:
    """Students, time, machine, commit of a result, in a sentence."""
    students = found["students"]
    machine = found.get("machine") or next((done["machine"] for done in students if "machine" in done), None)
    timed = [done["seconds"] for done in students if done.get("seconds") is not None]
    words = [f"{counted(len(students), 'student')} in {sum(timed):.0f} s by the clock, one thread each"]
    if machine:
        words.append(f"({machine_of({'machine': machine})})")
    made = made_of(found)
    return " ".join(words) + (f"; commit {made}." if made else "; commit not recorded.")


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
class Plot:
    """Lines through points; ``log``: the horizontal axis has base 2."""

    title: str
    across: str
    up: str
    series: Mapping[str, Points]
    log: bool = False

    def draw(self, file: pathlib.Path) -> None:
        """As PNG, by matplotlib (scripts/pins/proof.txt)."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7.2, 4.0), dpi=100)
        for i, (name, points) in enumerate(self.series.items()):
            x, y = zip(*points)
            axes.plot(
                x, y, label=name, color=COLOURS[i % len(COLOURS)], marker="o" if len(x) <= 8 else None, linewidth=1.5
            )
        if self.log:
            axes.set_xscale("log", base=2)
            marks = sorted({x for points in self.series.values() for x, _ in points})
            axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
        axes.set_title(self.title)
        axes.set_xlabel(self.across)
        axes.set_ylabel(self.up)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
        figure.tight_layout()
        figure.savefig(file, metadata={"Software": None})
        pyplot.close(figure)


class Page:
    """The page as it grows, and the plots beside it."""

    def __init__(self, results: pathlib.Path, page: pathlib.Path) -> None:
        self.results, self.page = results, page
        self.first: list[str] = []
        self.parts: list[str] = []
        self.plots: dict[str, Plot] = {}

    def read(self, name: str) -> Any:
        file = self.results / name
        return json.loads(file.read_text()) if file.exists() else None

    def say(self, *parts: str) -> None:
        self.parts += parts

    def warn(self, line: str) -> None:
        """What stands at the top of the page: what contradicts a paper or our own words, and what is missing."""
        self.first.append(line)

    def plot(self, name: str, what: str, plot: Plot) -> None:
        self.plots[name] = plot
        self.say(f"![{what}]({self.results.name}/{name})")


def trends(
    page: Page, words: str, of: Mapping[str, Sequence[float]], why: str, at_least: Mapping[str, float] | None = None
) -> None:
    """A trend of a paper, measured once or several times: ``of`` has what should be below 0, one value of each seed.

    Where a mean is on the wrong side the page says so at its top, significant or not, with ``why`` that may be at this size. ``at_least``: half of an interval
    that is known from counts, for where few seeds agree by chance; the wider one is taken.
    """
    numbers = {len(gaps) for gaps in of.values() if gaps}
    kind, against = ("Measured otherwise than the paper does", "not as the paper's trend would have it")
    if not words.startswith("the same by"):
        kind, against = ("Trend of the paper", "on the wrong side of a paper")
    lines, wrong = [], []
    for label, gaps in of.items():
        if not gaps:
            continue
        mean, half = mean_and_half(gaps)
        half = max(half, (at_least or {}).get(label, 0.0))
        far = f"{label + ': ' if label else ''}{mean:+.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")
        if len(numbers) > 1:
            far += f" of {counted(len(gaps), 'seed')}"
        if not math.isnan(half) and abs(mean) > half:
            verdict = "**shows**" if mean < 0 else "**the opposite shows**"
        else:
            verdict = f"**open**, {'on its side' if mean < 0 else 'on the wrong side'}{', one seed' if math.isnan(half) else ''}"
        lines.append(f"{far} ({verdict})")
        if mean >= 0:
            wrong.append(far + (" (beyond its interval)" if verdict.startswith("**the") else ""))
    if not lines:
        return
    seeds = " to ".join(str(number) for number in sorted(numbers)) + f" seed{'s' * (numbers != {1})}"
    page.say(f"{kind}: {words} ({seeds}): {'; '.join(lines)}.{f' Why that may be: {why}' if wrong else ''}")
    if wrong:
        page.warn(f"{against[0].upper()}{against[1:]}: {words} ({seeds}): {'; '.join(wrong)}. {why}")
