"""Mistakes of ours, made on purpose: a comparison that does not see the one it is about proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from stillhouse.views import mdlm, schedule


@dataclass(frozen=True)
class Mutation:
    """A function of ours that is replaced by one made of it."""

    paper: str
    what: str
    owner: Any
    name: str
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]]

    @contextmanager
    def made(self) -> Iterator[None]:
        """While this lasts, ours is wrong."""
        right = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.wrong(right))
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)


def _scaled(by: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda right: lambda *args, **kwargs: right(*args, **kwargs) * by


MUTATIONS = (
    Mutation("mdlm", "weights a thousandth too large", schedule.Schedule, "weight", _scaled(1.001)),
    Mutation("mdlm", "uniforms of masks mirrored", mdlm, "uniforms", lambda right: lambda *a, **k: 1 - right(*a, **k)),
)
