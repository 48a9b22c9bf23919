"""What the load client is told and what it answers. Rule: plain values, sent as JSON."""

from typing import Literal

import msgspec

Kind = Literal["paced", "closed", "accept", "first", "hold", "sockets"]


class Target(msgspec.Struct, frozen=True):
    """Where to send requests, and whose CPU and memory to read, by name."""

    port: int
    path: str
    pids: dict[str, int]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one client process does.

    `paced`: opens one stream for each body, and measures `window_s` once each has `warm` events.
    `closed`: keeps `in_flight` unstreamed requests running for `window_s`, after `warm` of them.
    `accept`: sends each body on a connection of its own, `in_flight` at a time, until its head is
    there; measures after `warm` heads; all stay open until the end.
    `first`: one streamed request after the other, in turn at each target.
    `hold`: opens one stream for each body and reads memory before and after.
    `sockets`: the same with a WebSocket for each stream.
    """

    kind: Kind
    targets: list[Target]
    bodies: list[str]
    events: int = 0
    """How many events each whole stream must have."""
    warm: int = 0
    window_s: float = 0.0
    in_flight: int = 0


class Outcome(msgspec.Struct, kw_only=True):
    """What one client process saw, in its window."""

    units: int = 0
    """Tokens, or requests."""
    cpu_s: dict[str, float] = {}
    memory_bytes: dict[str, int] = {}
    """Growth by process."""
    p50_s: list[float] = []
    p99_s: list[float] = []
    """Times by target: gaps between events, or waits for the first one."""
    wall_s: float = 0.0
    foreign_cores: float = 0.0
    """Cores' worth of CPU that neither the measured processes nor the client used."""


class EnginePlan(msgspec.Struct, frozen=True):
    """What the engine runs alone: its time model, and so many generations."""

    sim: dict[str, float]
    prompt: list[int]
    hooks: list[dict[str, float] | None]
    tokens: int
    warm: int
    window_s: float


def percentile(values: list[float], share: float) -> float:
    """Return the value that so large a share of all does not exceed; NaN where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
