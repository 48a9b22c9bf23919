"""Who goes next, and who has waited too long. Rule: this file decides and never waits.

Three levels. *Classes* are strict: interactive before standard before batch, but a lower class
that waits is owed a share of what the others get, and goes first once it is owed anything: nobody
starves. *Tenants* of one class share by start-time fair queueing (Goyal, Vin, Cheng 1996): a
request's start tag is the later of the class's virtual time and its tenant's last finish tag, the
finish tag adds cost over weight, and the smallest start tag goes next. *Inside a tenant* the order
is one of three: first come; shortest predicted first; or `hybrid`, where each predicted token is a
moment of lateness, so a short request overtakes a long one, but none that came much earlier.
"""

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from ingress.holding import Full, Holding
from schemas.subjects import Lane
from schemas.tenant import PriorityClass

CLASSES: Final[tuple[PriorityClass, ...]] = ("interactive", "standard", "batch")
SHARE_OWED: Final[dict[PriorityClass, float]] = {"interactive": 0.0, "standard": 0.1, "batch": 0.05}
"""How much a waiting class is owed of each token that others are given."""

LATENESS_S_PER_TOKEN: Final = 0.01
"""The time one more token takes a client's own stream, about: what `hybrid` weighs waiting with."""

ADDED_UP_MAX: Final = 256
"""So many of a tenant's own requests are added up for a forecast; of more, the mean is taken."""


class Order(StrEnum):
    """How one tenant's requests are ordered among themselves."""

    FCFS = "fcfs"
    SJF = "sjf"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that waits. Times in seconds of one clock; `cost_tokens` is what it is expected to
    use, `output_tokens` the part of it that takes time. `lane`, `partition` and `key` (a key's id)
    decide nothing here: operators ask for them."""

    request: str
    tenant: str
    priority_class: PriorityClass
    weight: int
    cost_tokens: int
    output_tokens: int
    prompt_bytes: int
    arrived_s: float
    give_up_s: float
    tenant_max: int | None = None
    lane: Lane = "online"
    partition: int = 0
    key: str | None = None


class _Place(NamedTuple):
    key: float
    number: int
    ticket: Ticket


@dataclass(slots=True)
class _Flow:
    """One tenant's requests in one class, in their order; `start` counts while it is listed."""

    places: list[_Place] = field(default_factory=list)
    tokens: int = 0
    weight: int = 1
    start: float = 0.0
    finish: float = 0.0
    listed: bool = False


_NOBODY: Final = _Flow()


@dataclass(slots=True)
class _Class:
    """The tenants of one class; `starts` is a heap of the waiting ones by start tag."""

    flows: dict[str, _Flow] = field(default_factory=dict)
    starts: list[tuple[float, int, str]] = field(default_factory=list)
    virtual: float = 0.0
    waiting: int = 0
    tokens: int = 0
    owed: float = 0.0


class FairQueue:
    """The requests to one model that wait in this node; `holding` counts those to all models."""

    def __init__(self, *, order: Order = Order.HYBRID, holding: Holding | None = None) -> None:
        self._order = order
        self._holding = holding or Holding()
        self._classes: dict[PriorityClass, _Class] = {name: _Class() for name in CLASSES}
        self._places: dict[str, _Place] = {}
        self._give_up: list[tuple[float, str]] = []
        self._numbers = itertools.count()

    @property
    def depth(self) -> int:
        """How many requests wait."""
        return len(self._places)

    @property
    def tickets(self) -> Iterator[Ticket]:
        """Those that wait, in the order of their arrival."""
        return (place.ticket for place in self._places.values())

    @property
    def depths(self) -> dict[PriorityClass, int]:
        """How many requests of each class wait."""
        return {name: self._classes[name].waiting for name in CLASSES}

    def ticket(self, request: str) -> Ticket | None:
        """Return a waiting request's ticket."""
        place = self._places.get(request)
        return None if place is None else place.ticket

    def ahead_of(self, ticket: Ticket) -> int:
        """Return how many go before a waiting request if nobody else comes.

        What lower classes are owed is left out: it is an estimate where several wait.
        """
        of_class = self._classes[ticket.priority_class]
        heads = {tenant: (start, number) for start, number, tenant in of_class.starts}
        tags: dict[str, tuple[float, int]] = {}
        for tenant, flow in of_class.flows.items():
            if not flow.places:
                continue
            tag = heads[tenant]
            for place in flow.places:
                each = place.ticket
                tags[each.request] = tag
                tag = (tag[0] + each.cost_tokens / each.weight, place.number)
        above = sum(self._classes[name].waiting for name in _above(ticket.priority_class))
        return above + sum(tag < tags[ticket.request] for tag in tags.values())

    @property
    def tokens(self) -> int:
        """How many tokens they are expected to use."""
        return sum(of_class.tokens for of_class in self._classes.values())

    def full_for(self, ticket: Ticket) -> Full | None:
        """Say which bound a request would break if it were queued; None if it may be."""
        return self._holding.full_for(
            ticket.tenant,
            ticket.priority_class,
            prompt_bytes=ticket.prompt_bytes,
            tenant_max=ticket.tenant_max,
        )

    def offer(self, ticket: Ticket) -> Full | None:
        """Queue a request, or say which bound it would break."""
        full = self.full_for(ticket)
        if full is not None:
            return full
        self._holding.take(ticket.tenant, prompt_bytes=ticket.prompt_bytes)
        heapq.heappush(self._give_up, (ticket.give_up_s, ticket.request))
        self._enqueue(ticket)
        return None

    def next(self) -> Ticket | None:
        """Take the request whose turn it is out of the queue; None if none waits."""
        name = self._class_in_turn()
        if name is None:
            return None
        in_turn = all(not self._classes[above].waiting for above in _above(name))
        ticket = _take(self._classes[name])
        self._settle_debts(name, ticket, in_turn=in_turn)
        self._forget(ticket)
        return ticket

    def withdraw(self, request: str) -> bool:
        """Take a request out whose client has left; return whether it waited."""
        place = self._places.get(request)
        if place is None:
            return False
        self._remove(place)
        return True

    def expire(self, *, now_s: float) -> list[Ticket]:
        """Take out and return those who have waited too long."""
        expired = []
        while self._give_up and self._give_up[0][0] <= now_s:
            _, request = heapq.heappop(self._give_up)
            place = self._places.get(request)
            if place is not None:
                self._remove(place)
                expired.append(place.ticket)
        return expired

    def ahead_tokens(self, ticket: Ticket) -> float:
        """Return what would be served before a request if it were queued now: at least so much.

        Of its own tenant what goes before it, of others of its class what their weights give them
        until then, of the classes above all, or as much as its class is owed a share of; and what
        those below are owed. Who comes later, and goes before it all the same, is not in it.
        """
        name = ticket.priority_class
        of_class = self._classes[name]
        inside = self._ahead_inside(of_class, ticket)
        ahead = inside + sum(self._classes[above].tokens for above in _above(name))
        if share := SHARE_OWED[name]:
            ahead = min(ahead, inside + (inside + max(0.0, -of_class.owed)) / share)
        below = CLASSES[CLASSES.index(name) + 1 :]
        return ahead + sum(min(self._classes[n].tokens, SHARE_OWED[n] * ahead) for n in below)

    def _ahead_inside(self, of_class: _Class, ticket: Ticket) -> float:
        flow = of_class.flows.get(ticket.tenant, _NOBODY)
        own = self._ahead_of_own(flow, ticket)
        start = flow.start if flow.listed else max(of_class.virtual, flow.finish)
        start += own / ticket.weight
        one = (
            ticket.cost_tokens / ticket.weight
        )  # each goes before it once, as far as it is like it
        others = [of_class.flows[tenant] for at, _, tenant in of_class.starts if at <= start]
        return own + sum(
            min(other.tokens, max(start - other.start, one) * other.weight)
            for other in others
            if other is not flow
        )

    def _ahead_of_own(self, flow: _Flow, ticket: Ticket) -> float:
        before = bisect_right(flow.places, self._key(ticket), key=lambda place: place.key)
        if before == len(flow.places):
            return flow.tokens
        if before <= ADDED_UP_MAX:
            return sum(place.ticket.cost_tokens for place in flow.places[:before])
        return flow.tokens * before / len(flow.places)

    def _enqueue(self, ticket: Ticket) -> None:
        of_class = self._classes[ticket.priority_class]
        flow = of_class.flows.setdefault(ticket.tenant, _Flow())
        place = _Place(self._key(ticket), next(self._numbers), ticket)
        self._places[ticket.request] = place
        insort(flow.places, place)
        flow.weight = ticket.weight
        flow.tokens += ticket.cost_tokens
        of_class.tokens += ticket.cost_tokens
        of_class.waiting += 1
        if not flow.listed:
            flow.listed = True
            flow.start = max(of_class.virtual, flow.finish)
            heapq.heappush(of_class.starts, (flow.start, place.number, ticket.tenant))

    def _key(self, ticket: Ticket) -> float:
        match self._order:
            case Order.FCFS:
                return ticket.arrived_s
            case Order.SJF:
                return ticket.output_tokens
            case Order.HYBRID:
                return ticket.arrived_s + ticket.output_tokens * LATENESS_S_PER_TOKEN

    def _class_in_turn(self) -> PriorityClass | None:
        waiting = [name for name in CLASSES if self._classes[name].waiting]
        owed = [name for name in reversed(waiting) if self._classes[name].owed > 0]
        # The first in line needs no debt: it is served anyway.
        return owed[0] if owed else waiting[0] if waiting else None

    def _settle_debts(self, served: PriorityClass, ticket: Ticket, *, in_turn: bool) -> None:
        for name, of_class in self._classes.items():
            if name != served:
                owed = of_class.owed + SHARE_OWED[name] * ticket.cost_tokens
                # Who does not wait is owed nothing, but works off what it had beyond its share.
                of_class.owed = owed if of_class.waiting else min(owed, 0.0)
        of_class = self._classes[served]
        of_class.owed = 0.0 if in_turn else of_class.owed - ticket.cost_tokens

    def _remove(self, place: _Place) -> None:
        ticket = place.ticket
        of_class = self._classes[ticket.priority_class]
        flow = of_class.flows[ticket.tenant]
        del flow.places[bisect_left(flow.places, place)]
        _count_out(of_class, flow, ticket)
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        del self._places[ticket.request]
        self._holding.release(ticket.tenant, prompt_bytes=ticket.prompt_bytes)
        of_class = self._classes[ticket.priority_class]
        if not self._places:  # a new busy period: nobody has a past in it
            self._classes = {name: _Class() for name in CLASSES}
        elif not of_class.waiting:  # its tenants have none; the class has had what it has had
            self._classes[ticket.priority_class] = _Class(owed=min(of_class.owed, 0.0))


def _above(name: PriorityClass) -> tuple[PriorityClass, ...]:
    return CLASSES[: CLASSES.index(name)]


def _count_out(of_class: _Class, flow: _Flow, ticket: Ticket) -> None:
    flow.tokens -= ticket.cost_tokens
    of_class.tokens -= ticket.cost_tokens
    of_class.waiting -= 1


def _take(of_class: _Class) -> Ticket:
    """Take the next request of a class in which one waits."""
    while True:
        start, _, tenant = heapq.heappop(of_class.starts)
        flow = of_class.flows[tenant]
        flow.listed = False
        if not flow.places:  # all of them were withdrawn
            continue
        place = flow.places.pop(0)
        ticket = place.ticket
        of_class.virtual = max(of_class.virtual, start)
        flow.finish = start + ticket.cost_tokens / ticket.weight
        _count_out(of_class, flow, ticket)
        if flow.places:
            flow.listed = True
            flow.start = flow.finish
            heapq.heappush(of_class.starts, (flow.start, place.number, tenant))
        return ticket


class DrainRate:
    """How fast requests leave, over the last `window_s`; pure, with time as an argument."""

    def __init__(self, *, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._left: deque[float] = deque(maxlen=2048)

    def left(self, *, now_s: float) -> None:
        """Note that a request has left the queue."""
        self._left.append(now_s)

    def wait_s(self, ahead: int, *, now_s: float) -> int:
        """Return in how many seconds `ahead` requests will have left: 1 to 60, 60 if none does."""
        while self._left and now_s - self._left[0] > self._window_s:
            self._left.popleft()
        if not self._left:
            return 60
        span_s = max(now_s - self._left[0], 0.1)
        return max(1, min(60, math.ceil(ahead * span_s / len(self._left))))
