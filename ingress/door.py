"""The door to one lane of a model's queue: who waits before it, and how many stand behind it.

Rule: pure; whoever goes through is counted as standing behind until the broker's count shows it, or
until it is known that it never will. So each that goes through lands once, whatever comes of it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ingress.admission import DrainRate, FairQueue, Ticket
from ingress.census import Pace
from ingress.forecast import Forecast, Reading


@dataclass(slots=True)
class Door:
    """Who waits, how many have gone through, and how fast all this moved of late."""

    queue: FairQueue
    arrived: Pace = field(default_factory=Pace)
    left: Pace = field(default_factory=Pace)
    landed: int = 0
    """How many of those that went through are in REQUESTS, or will never be."""
    _rate: DrainRate = field(default_factory=DrainRate)
    _forecast: Forecast = field(default_factory=Forecast)
    _counted: int = 0
    _landed_before_count: int = 0
    _let_go: int = 0
    _let_go_tokens: int = 0

    @property
    def behind(self) -> int:
        """How many requests stand in REQUESTS or are on their way there, at most."""
        return self._counted + self._let_go - self._landed_before_count

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to be read or released."""
        return not self.queue.depth and not self.behind

    def watermark(self, most: int, *, slots: int, standing_s: float, now_s: float) -> int:
        """Return how many may stand behind: `most`, or fewer where slots become free so seldom that
        the last of them would stand there for longer than `standing_s`, beyond any fair order."""
        ends = self._forecast.ends_within(standing_s, slots=slots, now_s=now_s)
        return most if ends is None else min(most, slots + max(1, math.ceil(ends)))

    def is_open(self, watermark: int) -> bool:
        """Tell whether requests pass straight on."""
        return not self.queue.depth and self.behind < watermark

    def pass_on(self, ticket: Ticket) -> None:
        """Count a request that goes on to REQUESTS."""
        self._let_go += 1
        self._let_go_tokens += ticket.cost_tokens

    def release(self, watermark: int, *, now_s: float) -> Iterator[Ticket]:
        """Yield who goes through now, in turn: they wait no more and are counted."""
        while self.behind < watermark and (ticket := self.queue.next()) is not None:
            self.pass_on(ticket)
            self._rate.left(now_s=now_s)
            yield ticket

    def count(self, stored: int, *, ended: int, landed: int, slots: int, now_s: float) -> None:
        """Take the broker's count of the lane; `landed` is what had landed when it was asked for,
        `ended` how many requests have left the stream, `slots` the model's."""
        self._counted = stored
        self._landed_before_count = landed
        self._forecast.read(
            Reading(
                now_s=now_s,
                slots=slots,
                behind=self.behind,
                ended=ended,
                waiting=self.queue.depth,
                let_go=self._let_go,
                let_go_tokens=self._let_go_tokens,
            )
        )

    def foreseen_s(self, ticket: Ticket, *, slots: int, now_s: float) -> float | None:
        """Return for how long a request would wait at least, where that is longer than it may."""
        allowed_s = ticket.give_up_s - ticket.arrived_s
        if allowed_s <= 0:
            return None  # its deadline has passed, which is another refusal
        for ahead_tokens in (lambda _: self.queue.tokens, self.queue.ahead_tokens):
            # It could wait for all of them; else it is worth finding out for whom it must.
            wait_s = self._forecast.wait_s(
                now_s=now_s,
                slots=slots,
                behind=self.behind,
                waiting=self.queue.depth,
                ahead_tokens=ahead_tokens(ticket),
            )
            if wait_s <= allowed_s:
                return None
        return wait_s

    def retry_after_s(self, *, now_s: float) -> int:
        """Return in how many seconds those that wait will have gone through: 1 to 60."""
        return self._rate.wait_s(self.queue.depth, now_s=now_s)
