"""What came of each request, token by token, and how long each recovery took. Rule: pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from chaos.faults import Fault, Kind
from chaos.orders import Expected, Manner, Order

GAP_S: Final = 0.5
"""A pause between two tokens that no pace of ours explains."""


class Tally:
    """One order's way, from its first attempt to its answer. Times are of one clock."""

    def __init__(self, order: Order, expected: Expected, *, now_s: float) -> None:
        self.order = order
        self.expected = expected
        self.began_s = now_s
        self.ended_s: float | None = None
        self.requests: list[str] = []
        self.tokens = 0
        self.lost = 0
        self.repeated = 0
        self.wrong = 0
        self.run_twice = 0
        self.resumed = 0
        self.asked_again = 0
        self.last_id = -1
        self.left = False
        self.cancelled = False
        self.error: str | None = None
        self.surprises: list[str] = []
        self.gaps: list[tuple[float, float]] = []
        self._next = 0
        self._heard_s = now_s

    def accepted(self, request: str, *, now_s: float) -> None:
        """Note that a node has taken the request; the answer begins anew."""
        if self.order.key is not None and self.requests and request not in self.requests:
            self.run_twice += 1
            self._surprise(f"one key, but {self.requests[-1]} and {request}")
        self.requests.append(request)
        self.last_id = -1
        self.tokens = 0
        self._next = 0
        self._heard_s = now_s

    def heard(self, *, now_s: float) -> None:
        """Note a sign of progress."""
        if now_s - self._heard_s > GAP_S:
            self.gaps.append((self._heard_s, now_s))
        self._heard_s = now_s

    def token(self, seq: int, text: str, *, now_s: float) -> None:
        """Take an event that holds text."""
        self.heard(now_s=now_s)
        events = self.expected.events
        if seq <= self.last_id:
            self.repeated += 1
            self._surprise(f"id {seq} came after {self.last_id}: {text!r}")
            return
        self.last_id = seq
        while self._next < len(events) and events[self._next][0] < seq:
            self.lost += 1
            self._surprise(f"not given: {events[self._next]}")
            self._next += 1
        if self._next < len(events) and events[self._next] == (seq, text):
            self.tokens += 1
        else:
            self.wrong += 1
            there = events[self._next] if self._next < len(events) else "the end"
            self._surprise(f"expected {there}, got {(seq, text)}")
        self._next += 1

    def whole(self, text: str, *, now_s: float) -> None:
        """Take the text of an answer that was not streamed."""
        self.heard(now_s=now_s)
        if text == self.expected.text:
            self.tokens += self.expected.tokens
        else:
            self.wrong += 1
            self._surprise(f"expected {self.expected.text!r}, got {text!r}")
        self._next = len(self.expected.events)

    def usage(self, completion_tokens: int) -> None:
        """Compare how many tokens the answer says it has."""
        if completion_tokens != self.expected.tokens:
            self.wrong += 1
            self._surprise(f"usage {completion_tokens}, expected {self.expected.tokens}")

    def end(self, *, now_s: float, error: str | None = None) -> None:
        """Note the end: of an answer that is whole, or of one that failed."""
        self.ended_s = now_s
        self.error = error
        if error is None and not self.left and not self.cancelled:
            missing = len(self.expected.events) - self._next
            if missing > 0:
                self.lost += missing
                self._surprise(f"ended without its last {missing} events")

    def _surprise(self, text: str) -> None:
        if len(self.surprises) < 10:
            self.surprises.append(text)

    @property
    def answered(self) -> bool:
        """Whether it came to an end that its client was told of, or that its client chose."""
        return self.ended_s is not None

    @property
    def failed(self) -> bool:
        """Whether anything about it is not as it must be."""
        counts = (self.lost, self.repeated, self.wrong, self.run_twice)
        return any(counts) or self.error is not None or not self.answered


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault as it was done: by the run's clock."""

    fault: Fault
    began_s: float
    mended_s: float
    """When the target was whole again: thawed, connected, ready."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How long a stream waited for its next token after a kill -9 of a worker."""

    worker: str
    request: str
    took_s: float
    alone: bool
    """Whether nothing else was wrong meanwhile."""


DEATHS_MAX: Final = 3
"""So many deaths of workers that ran it make a dead letter of a request: that is promised too."""


def was_given_up(tally: Tally, happened: Iterable[Happened]) -> bool:
    """Whether a request became a dead letter, and had the deaths for it."""
    if tally.error is None or not tally.error.startswith("worker_lost") or tally.ended_s is None:
        return False
    deaths = sum(
        each.fault.kind is Kind.KILL
        and each.fault.target.startswith("worker")
        and tally.began_s <= each.began_s <= tally.ended_s
        for each in happened
    )
    return deaths >= DEATHS_MAX and not (tally.lost or tally.repeated or tally.wrong)


def recoveries(happened: Sequence[Happened], tallies: Iterable[Tally]) -> list[Recovery]:
    """Return the waits of all streams that a worker's death interrupted."""
    kills = [
        each
        for each in happened
        if each.fault.kind is Kind.KILL and each.fault.target.startswith("worker")
    ]
    found = []
    for tally in tallies:
        if tally.order.manner is Manner.WHOLE:
            continue  # its client sees no tokens come
        for began_s, ended_s in tally.gaps:
            for kill in kills:
                if began_s - 0.1 <= kill.began_s < ended_s - GAP_S:
                    alone = _alone(kill, happened, ended_s)
                    request = tally.requests[-1] if tally.requests else tally.order.name
                    took_s = ended_s - kill.began_s
                    found.append(Recovery(kill.fault.target, request, took_s, alone))
    return found


def _alone(kill: Happened, happened: Iterable[Happened], until_s: float) -> bool:
    return not any(
        other is not kill and other.began_s < until_s and other.mended_s > kill.began_s
        for other in happened
    )


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the value below which this share lies; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


@dataclass(frozen=True, slots=True)
class Totals:
    """All requests together."""

    by_manner: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0
    lost: int = 0
    repeated: int = 0
    wrong: int = 0
    run_twice: int = 0
    unanswered: int = 0
    errors: int = 0
    resumed: int = 0
    asked_again: int = 0


def totals(tallies: Sequence[Tally]) -> Totals:
    """Add up."""
    manners = {manner.value: 0 for manner in Manner}
    for tally in tallies:
        manners[tally.order.manner.value] += 1
    return Totals(
        by_manner=manners,
        requests=len(tallies),
        tokens=sum(tally.tokens for tally in tallies),
        lost=sum(tally.lost for tally in tallies),
        repeated=sum(tally.repeated for tally in tallies),
        wrong=sum(tally.wrong for tally in tallies),
        run_twice=sum(tally.run_twice for tally in tallies),
        unanswered=sum(not tally.answered for tally in tallies),
        errors=sum(tally.error is not None for tally in tallies),
        resumed=sum(tally.resumed for tally in tallies),
        asked_again=sum(tally.asked_again for tally in tallies),
    )
