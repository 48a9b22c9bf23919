"""How long a request would wait for a slot. Rule: in doubt less, and without measurements nothing.

What goes before a request, divided by how fast such leaves. Behind the queue's door that is
requests above the slots, and the rate at which the broker's count says that requests end, whichever
node they came from. Before the door it is tokens, in which the fair order counts (a tenant's long
requests stand for more of its share than short ones), and the rate at which this node let go. Both
rates are capacities only while there was more than enough to do, so only such time is measured; and
no rate counts before as many requests as there are slots have left in it, one turn of them all, and
16: slots that were filled at once are freed at once, and a part of a turn says nothing. So do the
tokens of few requests: one that may make 30,000 need not take as long as 300 of 100 did. Where less
than a turn waits, the wait is at most what so many requests took to leave.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

WINDOW_S: Final = 10.0
"""Busy time over which a rate is the mean, or one turn of the slots where that takes longer."""
STALE_S: Final = 60.0
"""A rate of which nothing was measured for so long is forgotten."""
GAP_S_MAX: Final = 0.5
"""Two readings that are further apart do not tell whether there was enough to do in between."""
SPAN_S_MIN: Final = 0.1
TURN_MIN: Final = 16
"""Of fewer requests than that the rate is a guess, however few the slots."""
SPANS_MAX: Final = 10_000
"""1,000 s of busy time, which is longer than any generation: slower slots tell nothing."""
RETRY_AFTER_S_MAX: Final = 60


class _Span(NamedTuple):
    """A piece of busy time: its end, its length, and the requests and units that left in it."""

    end_s: float
    length_s: float
    requests: int
    units: float


class Rates(NamedTuple):
    """What leaves in a second."""

    requests_per_s: float
    units_per_s: float


class Drain:
    """How fast something leaves while there is enough of it."""

    def __init__(self) -> None:
        self._spans: deque[_Span] = deque()
        self._length_s = 0.0
        self._requests = 0
        self._units = 0.0

    def note(
        self, *, now_s: float, length_s: float, requests: int, units: float, turn: int
    ) -> None:
        """Note what left in the `length_s` before now; a `turn` of requests is kept at least."""
        last = _Span(now_s, length_s, requests, units)
        if self._spans and self._spans[-1].length_s < SPAN_S_MIN:  # readings come often
            before = self._spans.pop()
            self._add(before, -1)
            last = _Span(
                now_s, before.length_s + length_s, before.requests + requests, before.units + units
            )
        self._spans.append(last)
        self._add(last, 1)
        while len(self._spans) > SPANS_MAX or (
            self._length_s - self._spans[0].length_s >= WINDOW_S
            and self._requests - self._spans[0].requests >= turn
        ):
            self._add(self._spans.popleft(), -1)

    def rates(self, *, now_s: float, turn: int) -> Rates | None:
        """Return how fast it leaves; None where too little was measured."""
        if not self._spans or now_s - self._spans[-1].end_s > STALE_S:
            self.forget()
            return None
        if self._requests < turn or self._length_s < SPAN_S_MIN or self._units <= 0:
            return None
        return Rates(self._requests / self._length_s, self._units / self._length_s)

    def forget(self) -> None:
        """Begin anew."""
        self._spans.clear()
        self._length_s = self._units = 0.0
        self._requests = 0

    def _add(self, span: _Span, sign: int) -> None:
        self._length_s += sign * span.length_s
        self._requests += sign * span.requests
        self._units += sign * span.units


@dataclass(frozen=True, slots=True)
class Reading:
    """A model's queue at one moment. `slots`, of its live workers; `behind`: requests in REQUESTS,
    running ones too; `ended`: how many have left REQUESTS since it was made; `waiting`: requests
    before the door; `let_go`, `let_go_tokens`: what this node has let through it so far."""

    now_s: float
    slots: int
    behind: int
    ended: int
    waiting: int
    let_go: int
    let_go_tokens: int


@dataclass(slots=True)
class Forecast:
    """Learns from readings how fast a model's requests leave, and tells how long one would wait."""

    _ends: Drain = field(default_factory=Drain)
    _lets: Drain = field(default_factory=Drain)
    _last: Reading | None = None

    def read(self, reading: Reading) -> None:
        """Learn from a reading; they are made at short distances while the slots are full."""
        last, self._last = self._last, reading
        if last is None:
            return
        if reading.slots > last.slots or reading.ended < last.ended:
            self._ends.forget()  # more slots than were measured, or another stream
            self._lets.forget()
            return
        length_s = reading.now_s - last.now_s
        if not 0 < length_s <= GAP_S_MAX or not last.slots:
            return
        # What was busy at its beginning counts, or the last one to leave would never be counted.
        if last.behind > last.slots:
            ended = reading.ended - last.ended
            self._ends.note(
                now_s=reading.now_s,
                length_s=length_s,
                requests=ended,
                units=ended,
                turn=_turn(reading),
            )
        if last.waiting:
            self._lets.note(
                now_s=reading.now_s,
                length_s=length_s,
                requests=reading.let_go - last.let_go,
                units=reading.let_go_tokens - last.let_go_tokens,
                turn=_turn(reading),
            )

    def ends_within(self, seconds: float, *, slots: int, now_s: float) -> float | None:
        """Return how many requests end in so long while all of the model's slots are busy; None
        where nothing tells."""
        last = self._last
        if last is None or not 0 < slots <= last.slots:
            return None
        ends = self._ends.rates(now_s=now_s, turn=_turn(last))
        return None if ends is None else ends.units_per_s * seconds

    def wait_s(
        self, *, now_s: float, slots: int, behind: int, waiting: int, ahead_tokens: float
    ) -> float:
        """Return for how long a request would wait for a slot, at least; 0 where nothing tells.

        `slots` are the model's now, `behind` requests stand behind the door or on their way, of the
        `waiting` before it some go before it, which have `ahead_tokens`.
        """
        last = self._last
        if last is None or not 0 < slots <= last.slots:
            return 0.0  # slots that came since the last reading have not been measured
        wait_s, turn = 0.0, _turn(last)
        ends = self._ends.rates(now_s=now_s, turn=turn)
        if ends is not None and behind > last.slots:
            since_s = max(0.0, now_s - last.now_s)  # some have ended since the count
            wait_s += max(0.0, (behind - last.slots) / ends.units_per_s - since_s)
        lets = self._lets.rates(now_s=now_s, turn=turn)
        if lets is not None:
            before_s = ahead_tokens / lets.units_per_s
            if waiting < turn:
                before_s = min(before_s, waiting / lets.requests_per_s)
            wait_s += before_s
        return wait_s


def _turn(reading: Reading) -> int:
    return max(reading.slots, TURN_MIN)


def retry_after_s(*, wait_s: float, allowed_s: float) -> int:
    """Return when a request that would wait `wait_s` may come again, to wait `allowed_s`."""
    return max(1, min(RETRY_AFTER_S_MAX, math.ceil(wait_s - allowed_s)))
