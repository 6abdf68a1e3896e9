"""The schedule α(t), the part of a sequence that is not masked at time t, and the loss weight that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..info import Info
from .keyed import ViewError

Times = float | npt.NDArray[np.floating]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Schedule:
    """α(t) = (1 − t)^power. Power 1 is the linear schedule (MDLM's log-linear), power 3 that of Prime's images.

    All functions take numbers or numpy arrays and compute in float64.
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.power < float("inf"):
            raise ViewError(f"power: got {self.power}, valid: more than 0")

    def alpha(self, t: Times) -> Doubles:
        """α(t)."""
        return np.asarray((1.0 - np.asarray(t, np.float64)) ** self.power)

    def share(self, t: Times) -> Doubles:
        """1 − α(t): the probability of a token to be masked, or to be in group 1."""
        # The data set's writer draws with t itself under the linear schedule, not with 1 − (1 − t).
        return np.asarray(t, np.float64) if self.power == 1.0 else np.asarray(1.0 - self.alpha(t))

    def time_of(self, share: Times) -> Doubles:
        """The t at which 1 − α(t) is ``share``."""
        kept = 1.0 - np.asarray(share, np.float64)
        return np.asarray(share, np.float64) if self.power == 1.0 else np.asarray(1.0 - kept ** (1.0 / self.power))

    def derivative(self, t: Times) -> Doubles:
        """α'(t)."""
        return np.asarray(-self.power * (1.0 - np.asarray(t, np.float64)) ** (self.power - 1.0))

    def weight(self, t: Times) -> Doubles:
        """w(t) = −α'(t) / (1 − α(t)), the weight of a masked token in MDLM's bound (PGM, Eq. 4); linear: 1 / t."""
        return np.asarray(-self.derivative(t) / self.share(t))

    def complement_weight(self, t: Times) -> Doubles:
        """−α'(t) / α(t): the weight of the complement, the tokens that are *not* masked at t, when they are targets.

        They are masked with probability m = α(t). MDLM's bound is ∫ (1/m) CE dm over the mask probability, and
        dm = |α'(t)| dt. Linear: 1 / (1 − t), which is w(1 − t); under other schedules w(1 − t) would not be the bound.
        """
        return np.asarray(-self.derivative(t) / self.alpha(t))


class Arccos(Schedule):
    """α(t) = 1 − arccos(1 − t)·2/π, MaskGIT's and so that of PGM's images: their share arccos(r)·2/π with r = 1 − t uniform."""

    def alpha(self, t: Times) -> Doubles:
        """α(t)."""
        return np.asarray(1.0 - self.share(t))

    def share(self, t: Times) -> Doubles:
        """1 − α(t)."""
        return np.asarray(np.arccos(1.0 - np.asarray(t, np.float64)) * TWO_OVER_PI)

    def time_of(self, share: Times) -> Doubles:
        """The t at which 1 − α(t) is ``share``."""
        return np.asarray(1.0 - np.cos(np.asarray(share, np.float64) / TWO_OVER_PI))

    def derivative(self, t: Times) -> Doubles:
        """α'(t)."""
        t = np.asarray(t, np.float64)
        return np.asarray(-TWO_OVER_PI / np.sqrt(t * (2.0 - t)))


TWO_OVER_PI = 0.636619772367581343
LINEAR = Schedule()
ARCCOS = Arccos()


def schedule_of(schedule: Schedule | str | None, info: Info | None) -> Schedule:
    """The schedule that an argument names; ``None`` is that of the data set, linear where it says nothing."""
    if isinstance(schedule, Schedule):
        return schedule
    if schedule is None and info is not None:
        return ARCCOS if info.schedule == "arccos" else Schedule(info.schedule_power)
    if schedule is None:
        raise ViewError(
            "schedule: the batch has no info, which has the schedule of its data set; valid: "
            "stillhouse.Batch(columns, info=ds.info), or schedule='linear', 'arccos' or Schedule(power)"
        )
    if schedule == "linear":
        return LINEAR
    if schedule == "arccos":
        return ARCCOS
    raise ViewError(f"schedule: got {schedule!r}, valid: 'linear', 'arccos' or Schedule(power)")
