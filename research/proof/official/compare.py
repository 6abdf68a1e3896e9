"""What a comparison is, and when two results are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .theirs import Code

EXACT, F32, F64 = 0.0, 2e-6, 1e-12
"""Bounds: of integers and truth values; of some operations in f32; in f64."""


@dataclass(frozen=True)
class Because:
    """The line of theirs that makes the difference, and both results once it is taken account of."""

    line: str
    words: str
    theirs: Any
    ours: Any
    first: bool = False
    """Whether the page tells it first: it is against a paper, or against what our own words let one expect."""


@dataclass(frozen=True)
class Comparison:
    """One result of theirs beside the one of ours that is to be the same."""

    name: str
    what: str
    code: Code | None
    at: str
    ours_by: str
    theirs: Any
    ours: Any
    bound: float = EXACT
    because: Because | None = None
    absolute: float = field(default=0.0, kw_only=True)
    """A bound of the absolute difference instead, where noise is compared: a ξ near 0 has no relative precision."""
    printed: str | None = field(default=None, kw_only=True)
    """Where there is no code: the page of the paper that ``theirs`` was read from."""

    def judged(self) -> dict[str, Any]:
        """As it stands in official.json."""
        far, relative, alike = apart(self.theirs, self.ours, self.bound, self.absolute)
        array = _array(self.theirs)
        made: dict[str, Any] = {
            "name": self.name,
            "what": self.what,
            "paper": self.code.repository.paper if self.code else self.name.split(":")[0].upper(),
            "repository": self.code.repository.name if self.code else None,
            "commit": self.code.repository.commit if self.code else None,
            "theirs": self.at if self.code else self.printed,
            "ours": self.ours_by,
            "shape": list(array.shape),
            "dtype": {"theirs": str(array.dtype), "ours": str(_array(self.ours).dtype)},
            "bound": {"absolute": self.absolute} if self.absolute else {"relative": self.bound},
            "difference": far,
            "relative": relative,
            "verdict": "equal" if alike else "contradiction",
        }
        if self.because is not None:
            after_far, after_relative, after = apart(self.because.theirs, self.because.ours, self.bound, self.absolute)
            if alike:
                made["verdict"] = "contradiction"
                made["why"] = {"line": self.because.line, "words": "equal, where a difference is said to be"}
            else:
                made["verdict"] = "explained" if after else "contradiction"
                made["why"] = {
                    "line": self.because.line,
                    "words": self.because.words,
                    "first": self.because.first,
                    "difference": after_far,
                    "relative": after_relative,
                }
        return made


def _array(value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        value = value.numpy()
    return np.asarray(value)


def apart(theirs: Any, ours: Any, bound: float, absolute: float = 0.0) -> tuple[float | None, float | None, bool]:
    """The largest absolute and relative difference, and whether the relative one is within the bound; None where shapes differ or one is no number."""
    a, b = _array(theirs), _array(ours)
    if a.shape != b.shape:
        return None, None, False
    x, y = a.astype(np.float64), b.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    if not np.all(np.isfinite(x[~same])) or not np.all(np.isfinite(y[~same])):
        return None, None, False
    far = np.where(same, 0.0, np.abs(np.where(same, 0.0, x) - np.where(same, 0.0, y)))
    scale = np.maximum(np.abs(x), np.abs(y))
    relative = np.divide(far, scale, out=np.zeros_like(far), where=far > 0)
    if far.size == 0:
        return 0.0, 0.0, False  # nothing was compared
    return float(far.max()), float(relative.max()), bool(np.all((far <= absolute) | (relative <= bound)))


def altered(value: Any, absolute: float = 0.0) -> Any:
    """A copy of which one entry is wrong: by one, or by a thousandth, or by twice the bound where it is an absolute one."""
    wrong = np.array(_array(value), copy=True)
    at = np.unravel_index(
        int(np.argmax(np.abs(wrong.astype(np.float64)) if wrong.dtype.kind == "f" else wrong)), wrong.shape
    )
    if wrong.dtype.kind == "b":
        wrong[at] = not wrong[at]
    elif wrong.dtype.kind == "f":
        by = max(abs(wrong[at]) * 1e-3, 2 * absolute)
        wrong[at] = wrong[at] + by if np.isfinite(wrong[at]) and by else 1.0
    else:
        wrong[at] = wrong[at] + 1
    return wrong


def caught(comparison: Comparison) -> bool:
    """Whether one wrong entry of ours would be seen."""
    because = comparison.because
    if because is not None:
        return not apart(
            because.theirs, altered(because.ours, comparison.absolute), comparison.bound, comparison.absolute
        )[2]
    return not apart(
        comparison.theirs, altered(comparison.ours, comparison.absolute), comparison.bound, comparison.absolute
    )[2]


Comparisons = Callable[[Any, Any], Iterator[Comparison]]
