"""Plots of the pages of proofs."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COLOURS = ["#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b", "#555555", "#00897b", "#d81b60"]
CEILING_STYLES = ["--", ":", "-."]

Points = Sequence[tuple[float, float]]
Intervals = Sequence[tuple[float, float]]
"""The lower and upper end of the interval of each point."""


@dataclass(frozen=True)
class Plot:
    """Lines through points; ``log``: the horizontal axis has base 2."""

    title: str
    across: str
    up: str
    series: Mapping[str, Points]
    log: bool = False
    intervals: Mapping[str, Intervals] = field(default_factory=dict)
    """95 % intervals of the points of a series, drawn as error bars."""
    ceilings: Mapping[str, Points] = field(default_factory=dict)
    """What students can reach at best, drawn as grey lines without markers."""

    def draw(self, file: pathlib.Path) -> None:
        """As PNG, by matplotlib (scripts/pins/proof.txt)."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7.2, 4.0), dpi=100)
        for i, (name, points) in enumerate(self.series.items()):
            x, y = zip(*points)
            colour, marker = COLOURS[i % len(COLOURS)], "o" if len(x) <= 8 else None
            axes.plot(x, y, label=name, color=colour, marker=marker, linewidth=1.5)
            if name in self.intervals:
                ends = [(middle - low, high - middle) for middle, (low, high) in zip(y, self.intervals[name])]
                axes.errorbar(x, y, yerr=list(zip(*ends)), fmt="none", ecolor=colour, capsize=4)
        for i, (name, points) in enumerate(self.ceilings.items()):
            x, y = zip(*points)
            style = CEILING_STYLES[i % len(CEILING_STYLES)]
            axes.plot(x, y, label=name, color="#555555", linestyle=style, linewidth=1.2)
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
