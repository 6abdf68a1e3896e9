"""Trends of the papers: a difference over seeds, and whether its interval lies on the paper's side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from page_parts import Page, counted, mean_and_half, table

VERDICTS = """\
- A difference below 0 agrees with the paper.
- *supported*: the whole interval is below 0.
- *contradicted*: the whole interval is above 0.
- *open*: the interval contains 0, or there is one seed. *Opposite sign* marks a mean above 0.
- Intervals are not corrected for the number of trends: of 20 trends that do not exist, one is supported by chance."""


@dataclass(frozen=True)
class Case:
    """A trend measured once: at a number of passes, for a number of digits."""

    label: str
    mean: float
    half: float
    """Half of the 95 % interval; NaN for one seed."""
    seeds: int

    @property
    def verdict(self) -> str:
        if math.isnan(self.half) or abs(self.mean) <= self.half:
            return "open"
        return "supported" if self.mean < 0 else "contradicted"

    @property
    def figure(self) -> str:
        """The difference with its label and interval."""
        far = f"{self.mean:+.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")
        return f"{self.label}: {far}" if self.label else far


@dataclass(frozen=True)
class Trend:
    """What a paper says, and the difference that should be below 0."""

    claim: str
    source: str
    """The paper and its table."""
    unit: str
    cases: Sequence[Case]
    why: str
    """Possible reasons where a mean is not below 0."""
    is_own_measure: bool = False
    """The paper does not measure this; it is left out where trends are counted."""

    @property
    def name(self) -> str:
        return f"{self.claim[0].upper()}{self.claim[1:]}"

    @property
    def seeds(self) -> str:
        return " to ".join(str(number) for number in sorted({case.seeds for case in self.cases}))

    def opposite(self, verdict: str) -> list[str]:
        """The labels of what has this verdict and a mean that is not below 0."""
        return [case.label for case in self.cases if case.verdict == verdict and case.mean >= 0]

    def cell(self) -> str:
        """All figures with their verdicts."""
        several = len({case.seeds for case in self.cases}) > 1
        told = []
        for case in self.cases:
            verdict = f"**{case.verdict}**" if case.verdict != "open" else "open"
            verdict += ", opposite sign" if verdict == "open" and case.mean >= 0 else ""
            verdict += ", one seed" if math.isnan(case.half) else ""
            seeds = f" of {counted(case.seeds, 'seed')}" if several else ""
            told.append(f"{case.figure}{seeds} ({verdict})")
        return "; ".join(told)


def trends(
    page: Page,
    claim: str,
    source: str,
    unit: str,
    of: Mapping[str, Sequence[float]],
    why: str,
    at_least: Mapping[str, float] | None = None,
    is_own_measure: bool = False,
) -> None:
    """Adds a trend to the page: ``of`` has, for each case, one value of each seed of what should be below 0.

    Where a mean is not below 0 the page says so among its contradictions. ``at_least``: half of an interval that is
    known from counts; the wider one is taken, since few seeds may agree by chance.
    """
    cases = []
    for label, gaps in of.items():
        if gaps:
            mean, half = mean_and_half(gaps)
            cases.append(Case(label, mean, max(half, (at_least or {}).get(label, 0.0)), len(gaps)))
    if not cases:
        return
    trend = Trend(claim, source, unit, cases, why, is_own_measure)
    page.trends.append(trend)
    told = []
    for verdict in ("contradicted", "open"):
        labels = trend.opposite(verdict)
        where = f" at {', '.join(labels)}" if any(labels) else ""
        if labels:
            told.append(f"{verdict}{where}{', opposite sign' if verdict == 'open' else ''}")
    if told:
        page.warn(f"{trend.name} ({source}): {'; '.join(told)}.")
    beyond = [case.figure for case in cases if case.verdict == "contradicted"]
    if beyond:
        page.contradict(f"{trend.name} ({source}): contradicted. Difference in {unit}: {'; '.join(beyond)}.")


def trend_parts(of: Sequence[Trend]) -> list[str]:
    """A table of trends, and possible reasons where a mean is not below 0."""
    rows = [[trend.claim, trend.source, trend.unit, trend.seeds, trend.cell()] for trend in of]
    parts = [table(["trend", "source", "difference in", "seeds", "differences and verdicts"], rows)]
    claims: dict[str, list[str]] = {}
    for trend in of:
        if any(case.mean >= 0 for case in trend.cases):
            claims.setdefault(trend.why, []).append(trend.name)
    if claims:
        reasons = [f"- {'; '.join(names)}. {why}" for why, names in claims.items()]
        parts += ["Possible reasons for an opposite sign:", "\n".join(reasons)]
    return parts
