"""When a process that ended is started again. Rule: this file decides and never waits."""

from dataclasses import dataclass
from typing import Final

DELAYS_S: Final = (0.0, 0.5, 1.0, 2.0)
"""The wait after the first, second … death in a row; the last one from then on."""
SETTLED_S: Final = 10.0
"""A process that lived this long had started well: its death is the first in a row."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often a process has died in a row."""

    deaths: int = 0

    def after(self, *, lived_s: float) -> "tuple[Restarts, float]":
        """Return the history with one more death, and how long to wait before the next start."""
        deaths = 1 if lived_s >= SETTLED_S else self.deaths + 1
        return Restarts(deaths), DELAYS_S[min(deaths, len(DELAYS_S)) - 1]
