"""Takes the sides in turn, and makes a table of what they measured."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import machine
from .processes import QUIET_CORES, SideFailed, wait_for_quiet


@dataclass
class Side:
    """Something that is measured: the program (a type of it) or a peer."""

    name: str
    measure: Callable[[], dict[str, Any]]
    """Runs it once: numbers by name, `others_cores` among them, and other facts."""
    ours: bool = False
    packages: tuple[str, ...] = ()
    """What has to be installed."""
    results: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    """Why it has no figures, or not those of all rounds."""
    failed: bool = False
    """Whether it was there and ended with an error."""

    def counted(self) -> list[dict[str, Any]]:
        """The runs that others left alone; all of them where there is none."""
        return [result for result in self.results if result["others_cores"] <= QUIET_CORES] or self.results

    def median(self, figure: str) -> float | None:
        values = [result[figure] for result in self.counted() if figure in result]
        return statistics.median(values) if values else None


def undisturbed(side: Side, patience: float, tries: int) -> dict[str, Any]:
    """A run while others leave the cores alone; of several tries the one that was disturbed least, whatever it measured."""
    results: list[dict[str, Any]] = []
    while not results or (len(results) < tries and results[-1]["others_cores"] > QUIET_CORES):
        wait_for_quiet(patience)
        results.append(side.measure())
    return min(results, key=lambda result: float(result["others_cores"]))


def in_turn(title: str, sides: list[Side], rounds: int, patience: float, tries: int) -> None:
    """Measures every side once, then every side again; one that fails is not asked again."""
    for side in sides:
        missing = [package for package in side.packages if machine.version(package) is None]
        if missing:
            side.failure = f"not installed: {', '.join(missing)} (.venv-peers/failed.txt says why)"
            print(f"{title}, {side.name}: {side.failure}", file=sys.stderr)
    for number in range(1, rounds + 1):
        for side in sides:
            if side.failure:
                continue
            try:
                side.results.append(undisturbed(side, patience, tries))
            except SideFailed as failed:
                side.failure, side.failed = f"failed: {failed}", True
            said = side.failure or ", ".join(
                f"{name} {value:,.4g}" for name, value in side.results[-1].items() if isinstance(value, (int, float))
            )
            print(f"{title}, round {number} of {rounds}, {side.name}: {said}", file=sys.stderr)


def table(sides: list[Side], figures: dict[str, str], rate: str, base: str | None = None) -> str:
    """
    Medians of the runs that others left alone, and how many times as fast the program is by the figure `rate`: its side `base`, where there is
    one, and its fastest.

    `figures` are the names of the figures with the heads of their columns.
    """
    ours = [side for side in sides if side.ours and side.median(rate)]
    fastest = max(ours, key=lambda side: side.median(rate) or 0.0, default=None)
    named = next((side for side in ours if side.name == base), None)
    of = list(dict.fromkeys(side.name for side in (named, fastest) if side is not None))
    rates = [next(side.median(rate) or 0.0 for side in ours if side.name == name) for name in of]
    heads = ["", *figures.values(), "runs", *(f"{name} ÷ this" for name in of)]
    lines = [row(heads), "|" + "---|" * len(heads)]
    for side in sides:
        cells = [f"**{side.name}**" if side.ours else side.name]
        cells += [figure(side.median(name)) for name in figures]
        cells += [f"{len(side.counted())} of {len(side.results)}"]
        own = side.median(rate)
        cells += [f"{one / own:.2f}" if own else "" for one in rates]
        if side.failure:
            cells[1] = f"{cells[1]} {side.failure}".strip()
        lines.append(row(cells))
    return "\n".join(lines)


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def as_json(sides: list[Side]) -> list[dict[str, Any]]:
    return [{"name": side.name, "ours": side.ours, "failure": side.failure, "runs": side.results} for side in sides]
