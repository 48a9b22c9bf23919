"""What goes wrong, and when. Rule: pure; the same seed makes the same plan.

A target suffers one fault at a time and is then left alone for a while, so that each fault meets a
process that had come back. Two targets may suffer at once.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

Tier = Literal["nats", "worker", "front"]

REST_S: Final = 4.0
"""How long a target is left alone after a fault: longer than a worker takes to come back."""
FREEZE_S: Final = (1.0, 8.0)
AWAY_S: Final = (0.0, 3.0)
"""How long a killed process stays away, and how long a cut connection cannot be made anew."""
CUT_OFF_S: Final = (0.5, 6.0)
TWICE: Final = 0.15
"""How often a second target suffers at the same moment."""


class Kind(StrEnum):
    """A kind of fault."""

    KILL = "kill -9"
    RESTART = "SIGTERM, restart"
    FREEZE = "SIGSTOP"
    CUT = "connection cut"
    HOLD = "connection silent"
    """Nothing passes for a while; then all that was sent arrives after all."""
    SWALLOW = "connection swallows"
    """What is sent for a while is lost; then the connection breaks."""


WEIGHTS: Final[Mapping[Tier, Mapping[Kind, int]]] = {
    "nats": {Kind.KILL: 2, Kind.FREEZE: 2, Kind.RESTART: 1},
    "worker": {
        Kind.KILL: 5,
        Kind.FREEZE: 3,
        Kind.RESTART: 2,
        Kind.CUT: 2,
        Kind.HOLD: 2,
        Kind.SWALLOW: 2,
    },
    "front": {
        Kind.KILL: 3,
        Kind.FREEZE: 2,
        Kind.RESTART: 2,
        Kind.CUT: 2,
        Kind.HOLD: 2,
        Kind.SWALLOW: 2,
    },
}
TIER_WEIGHTS: Final[Mapping[Tier, int]] = {"nats": 3, "worker": 9, "front": 6}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, so long after the start; `lasts_s` until it is mended."""

    at_s: float
    kind: Kind
    target: str
    lasts_s: float

    @property
    def end_s(self) -> float:
        """When it is mended; a process still has to come back then."""
        return self.at_s + self.lasts_s


def plan(
    *, seed: int, seconds: float, per_minute: float, targets: Mapping[str, Tier]
) -> tuple[Fault, ...]:
    """Return the faults of a run by time: the last one is mended before `seconds` are over."""
    dice = random.Random(seed)
    pause_s = 60.0 / per_minute
    free_s = dict.fromkeys(targets, 0.0)
    faults: list[Fault] = []
    at_s = 0.0
    while (at_s := at_s + dice.uniform(0.4, 1.6) * pause_s) < seconds:
        count = 2 if dice.random() < TWICE else 1
        for _ in range(count):
            free = [name for name in targets if free_s[name] <= at_s]
            if not free:
                break
            fault = _fault(dice, at_s, free, targets)
            if fault.end_s <= seconds:
                faults.append(fault)
                free_s[fault.target] = fault.end_s + REST_S
    return tuple(faults)


def _fault(
    dice: random.Random, at_s: float, free: Sequence[str], targets: Mapping[str, Tier]
) -> Fault:
    # A tier's weight is shared by its members: more workers do not spare nats-server.
    members = {tier: [name for name in free if targets[name] == tier] for tier in TIER_WEIGHTS}
    tiers = [tier for tier, names in members.items() if names]
    [tier] = dice.choices(tiers, [TIER_WEIGHTS[tier] for tier in tiers])
    target = dice.choice(members[tier])
    weights = WEIGHTS[tier]
    [kind] = dice.choices(list(weights), list(weights.values()))
    match kind:
        case Kind.FREEZE:
            lasts_s = dice.uniform(*FREEZE_S)
        case Kind.HOLD | Kind.SWALLOW:
            lasts_s = dice.uniform(*CUT_OFF_S)
        case Kind.KILL | Kind.CUT:
            # Half of them come back at once: who connects again first is another race.
            lasts_s = dice.choice([0.0, dice.uniform(*AWAY_S)])
        case Kind.RESTART:
            lasts_s = 0.0
    return Fault(round(at_s, 3), kind, target, round(lasts_s, 3))
