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
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from schemas.subjects import Lane
from schemas.tenant import PriorityClass

CLASSES: Final[tuple[PriorityClass, ...]] = ("interactive", "standard", "batch")
SHARE_OWED: Final[dict[PriorityClass, float]] = {"interactive": 0.0, "standard": 0.1, "batch": 0.05}
"""How much a waiting class is owed of each token that others are given."""

FILL_MAX: Final[dict[PriorityClass, float]] = {"interactive": 1.0, "standard": 0.9, "batch": 0.5}
"""Up to which part of the bounds a class may fill the queue: low ones are held back early."""

LATENESS_S_PER_TOKEN: Final = 0.01
"""The time one more token takes a client's own stream, about: what `hybrid` weighs waiting with."""


_STALE_MAX: Final = 64
"""How many places of requests that have left a tenant's heap may hold beyond those that wait."""


class Order(StrEnum):
    """How one tenant's requests are ordered among themselves."""

    FCFS = "fcfs"
    SJF = "sjf"
    HYBRID = "hybrid"


class Full(StrEnum):
    """Why a request is not queued."""

    TENANT = "tenant"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the queue may hold in all: requests, and bytes of their prompts."""

    requests_max: int = 10_000
    bytes_max: int = 256 * 1024 * 1024


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
    """One tenant's requests in one class."""

    places: list[_Place] = field(default_factory=list)
    waiting: int = 0
    finish: float = 0.0
    listed: bool = False


@dataclass(slots=True)
class _Class:
    """The tenants of one class; `starts` is a heap of the waiting ones by start tag."""

    flows: dict[str, _Flow] = field(default_factory=dict)
    starts: list[tuple[float, int, str]] = field(default_factory=list)
    virtual: float = 0.0
    waiting: int = 0
    owed: float = 0.0


class FairQueue:
    """The requests to one model that wait in this node."""

    def __init__(self, *, order: Order = Order.HYBRID, bounds: Bounds | None = None) -> None:
        self._order = order
        self._bounds = bounds or Bounds()
        self._classes: dict[PriorityClass, _Class] = {name: _Class() for name in CLASSES}
        self._tickets: dict[str, Ticket] = {}
        self._by_tenant: dict[str, int] = {}
        self._give_up: list[tuple[float, str]] = []
        self._numbers = itertools.count()
        self._bytes = 0

    @property
    def depth(self) -> int:
        """How many requests wait."""
        return len(self._tickets)

    @property
    def prompt_bytes(self) -> int:
        """How many bytes their prompts take."""
        return self._bytes

    @property
    def tickets(self) -> Collection[Ticket]:
        """Those that wait, in the order of their arrival."""
        return self._tickets.values()

    @property
    def depths(self) -> dict[PriorityClass, int]:
        """How many requests of each class wait."""
        return {name: self._classes[name].waiting for name in CLASSES}

    def ticket(self, request: str) -> Ticket | None:
        """Return a waiting request's ticket."""
        return self._tickets.get(request)

    def ahead_of(self, ticket: Ticket) -> int:
        """Return how many go before a waiting request if nobody else comes.

        What lower classes are owed is left out: it is an estimate where several wait.
        """
        of_class = self._classes[ticket.priority_class]
        heads = {tenant: (start, number) for start, number, tenant in of_class.starts}
        tags: dict[str, tuple[float, int]] = {}
        for tenant, flow in of_class.flows.items():
            if not flow.waiting:
                continue
            tag = heads[tenant]
            for place in sorted(flow.places):
                each = place.ticket
                if self._tickets.get(each.request) is each:
                    tags[each.request] = tag
                    tag = (tag[0] + each.cost_tokens / each.weight, place.number)
        above = sum(self._classes[name].waiting for name in _above(ticket.priority_class))
        return above + sum(tag < tags[ticket.request] for tag in tags.values())

    def offer(self, ticket: Ticket) -> Full | None:
        """Queue a request, or say which bound it would break."""
        waiting = self._by_tenant.get(ticket.tenant, 0)
        if ticket.tenant_max is not None and waiting >= ticket.tenant_max:
            return Full.TENANT
        fill = FILL_MAX[ticket.priority_class]
        if (
            self.depth >= self._bounds.requests_max * fill
            or self._bytes + ticket.prompt_bytes > self._bounds.bytes_max * fill
        ):
            return Full.QUEUE
        self._tickets[ticket.request] = ticket
        self._by_tenant[ticket.tenant] = waiting + 1
        self._bytes += ticket.prompt_bytes
        heapq.heappush(self._give_up, (ticket.give_up_s, ticket.request))
        self._enqueue(ticket)
        return None

    def next(self) -> Ticket | None:
        """Take the request whose turn it is out of the queue; None if none waits."""
        name = self._class_in_turn()
        if name is None:
            return None
        in_turn = all(not self._classes[above].waiting for above in _above(name))
        ticket = _take(self._classes[name], self._tickets)
        self._settle_debts(name, ticket, in_turn=in_turn)
        self._forget(ticket)
        return ticket

    def withdraw(self, request: str) -> bool:
        """Take a request out whose client has left; return whether it waited."""
        ticket = self._tickets.get(request)
        if ticket is None:
            return False
        self._remove(ticket)
        return True

    def expire(self, *, now_s: float) -> list[Ticket]:
        """Take out and return those who have waited too long."""
        expired = []
        while self._give_up and self._give_up[0][0] <= now_s:
            _, request = heapq.heappop(self._give_up)
            ticket = self._tickets.get(request)
            if ticket is not None:
                self._remove(ticket)
                expired.append(ticket)
        return expired

    def _enqueue(self, ticket: Ticket) -> None:
        of_class = self._classes[ticket.priority_class]
        flow = of_class.flows.setdefault(ticket.tenant, _Flow())
        number = next(self._numbers)
        heapq.heappush(flow.places, _Place(self._key(ticket), number, ticket))
        flow.waiting += 1
        of_class.waiting += 1
        if not flow.listed:
            flow.listed = True
            start = max(of_class.virtual, flow.finish)
            heapq.heappush(of_class.starts, (start, number, ticket.tenant))

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
            if name != served and of_class.waiting:
                of_class.owed += SHARE_OWED[name] * ticket.cost_tokens
        of_class = self._classes[served]
        of_class.owed = 0.0 if in_turn else of_class.owed - ticket.cost_tokens

    def _remove(self, ticket: Ticket) -> None:
        of_class = self._classes[ticket.priority_class]
        flow = of_class.flows[ticket.tenant]
        flow.waiting -= 1
        of_class.waiting -= 1
        self._forget(ticket)
        if len(flow.places) > 2 * flow.waiting + _STALE_MAX:
            flow.places = [p for p in flow.places if p.ticket.request in self._tickets]
            heapq.heapify(flow.places)

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request]
        self._bytes -= ticket.prompt_bytes
        left = self._by_tenant[ticket.tenant] - 1
        if left:
            self._by_tenant[ticket.tenant] = left
        else:
            del self._by_tenant[ticket.tenant]
        of_class = self._classes[ticket.priority_class]
        if not of_class.waiting:  # a new busy period: nobody has a past in it
            self._classes[ticket.priority_class] = _Class()


def _above(name: PriorityClass) -> tuple[PriorityClass, ...]:
    return CLASSES[: CLASSES.index(name)]


def _take(of_class: _Class, waiting: dict[str, Ticket]) -> Ticket:
    """Take the next request of a class in which one waits."""
    while True:
        start, _, tenant = heapq.heappop(of_class.starts)
        flow = of_class.flows[tenant]
        flow.listed = False
        if not flow.waiting:  # all of them were withdrawn
            continue
        place = heapq.heappop(flow.places)
        while waiting.get(place.ticket.request) is not place.ticket:
            place = heapq.heappop(flow.places)
        ticket = place.ticket
        of_class.virtual = max(of_class.virtual, start)
        flow.finish = start + ticket.cost_tokens / ticket.weight
        flow.waiting -= 1
        of_class.waiting -= 1
        if flow.waiting:
            flow.listed = True
            heapq.heappush(of_class.starts, (flow.finish, place.number, tenant))
        return ticket


class DrainRate:
    """How fast requests leave, over the last `window_s`; pure, with time as an argument."""

    def __init__(self, *, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._left: list[float] = []

    def left(self, *, now_s: float) -> None:
        """Note that a request has left the queue."""
        self._left.append(now_s)
        if len(self._left) > 2048:
            self._left = self._left[1024:]

    def wait_s(self, ahead: int, *, now_s: float) -> int:
        """Return in how many seconds `ahead` requests will have left: 1 to 60, 60 if none does."""
        recent = [at_s for at_s in self._left if now_s - at_s <= self._window_s]
        self._left = recent
        if not recent:
            return 60
        span_s = max(now_s - recent[0], 0.1)
        return max(1, min(60, math.ceil(ahead * span_s / len(recent))))
