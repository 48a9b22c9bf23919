"""What waits in this node, counted. Rule: pure; what is asked is found by looking at all of it.

Nothing is kept up to date for operators but who passed of late. At the queue's bounds, with a
tenant to each request, a count takes some 80 ms, so it is made from copies, in a thread.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ingress.admission import CLASSES, Ticket
from schemas.waiting import ROWS_MAX, Count, CountAnswer, CountQuestion, Mark, Selection

WINDOW_S: Final = 10.0
"""What rates are taken over."""
PASSED_MAX: Final = 4096
"""Of how many that passed a rate is known; at higher rates it is taken over a shorter time."""
_SPAN_S_MIN: Final = 0.1


class Passed(NamedTuple):
    """Who passed a point within a time, in seconds."""

    tickets: Sequence[Ticket]
    within_s: float


class Pace:
    """Who passed a point of late; pure, with time as an argument."""

    def __init__(self) -> None:
        self._passed: deque[tuple[float, Ticket]] = deque(maxlen=PASSED_MAX)

    def note(self, ticket: Ticket, *, now_s: float) -> None:
        """Note that a request has passed."""
        self._passed.append((now_s, ticket))

    def recent(self, *, now_s: float) -> Passed:
        """Return who passed within the window."""
        whole = len(self._passed) < PASSED_MAX
        while self._passed and now_s - self._passed[0][0] > WINDOW_S:
            whole = True
            self._passed.popleft()
        span_s = WINDOW_S if whole else now_s - self._passed[0][0]
        return Passed([ticket for _, ticket in self._passed], max(span_s, _SPAN_S_MIN))


class Hall(NamedTuple):
    """One model's waiting requests, what keeps them, and who came and left of late."""

    model: str
    tickets: Sequence[Ticket]
    mark: Mark
    arrived: Passed
    left: Passed


class Found(NamedTuple):
    """A request that waits, why, and about how many go before it."""

    model: str
    ticket: Ticket
    mark: Mark
    ahead: int


@dataclass(slots=True)
class _Cell:
    """A count while it is made; `first_s` is when the oldest came."""

    waiting: int = 0
    first_s: float = math.inf
    oldest: str | None = None
    prompt_bytes: int = 0
    arrival_per_s: float = 0.0
    drain_per_s: float = 0.0

    def wait(self, ticket: Ticket) -> None:
        self.waiting += 1
        self.prompt_bytes += ticket.prompt_bytes
        if ticket.arrived_s < self.first_s:
            self.first_s = ticket.arrived_s
            self.oldest = ticket.request

    def add(self, other: "_Cell") -> None:
        self.waiting += other.waiting
        self.prompt_bytes += other.prompt_bytes
        self.arrival_per_s += other.arrival_per_s
        self.drain_per_s += other.drain_per_s
        if other.first_s < self.first_s:
            self.first_s = other.first_s
            self.oldest = other.oldest

    def count(self, *, now_s: float) -> Count:
        return Count(
            waiting=self.waiting,
            oldest_age_s=round(max(now_s - self.first_s, 0.0), 3) if self.waiting else 0.0,
            oldest=self.oldest,
            prompt_bytes=self.prompt_bytes,
            arrival_per_s=round(self.arrival_per_s, 2),
            drain_per_s=round(self.drain_per_s, 2),
        )


_Cells = dict[tuple[str, str], _Cell]

_NAMES: Final[dict[str, Callable[[Ticket], str]]] = {
    "lane": lambda ticket: ticket.lane,
    "partition": lambda ticket: str(ticket.partition),
    "tenant": lambda ticket: ticket.tenant,
}
"""What a ticket's row is called; the model is its hall's."""


def selects(selection: Selection, model: str, ticket: Ticket) -> bool:
    """Tell whether a waiting request is meant."""
    return (
        selection.tenant in (None, ticket.tenant)
        and selection.model in (None, model)
        and selection.request in (None, ticket.request)
        and selection.key in (None, ticket.key)
    )


def count(
    halls: Iterable[Hall], question: CountQuestion, *, node: str, now_s: float
) -> CountAnswer:
    """Answer how much waits. What has no row because nothing waits has its rates in the total."""
    cells: _Cells = {}
    marks = {}
    for hall in halls:
        marks[hall.model] = hall.mark
        _count_hall(cells, hall, question)
    rows = _summed(cells, 0)
    waiting = [(name, cell) for name, cell in rows.items() if cell.waiting]
    top = dict(heapq.nsmallest(ROWS_MAX, waiting, key=lambda row: (-row[1].waiting, row[0])))
    rest = _sum(cell for name, cell in waiting if name not in top)
    classes = _summed(cells, 1)
    return CountAnswer(
        node=node,
        total=_sum(cells.values()).count(now_s=now_s),
        rows={name: cell.count(now_s=now_s) for name, cell in top.items()},
        rest=rest.count(now_s=now_s),
        classes={name: classes.get(name, _Cell()).count(now_s=now_s) for name in CLASSES},
        marks=marks,
    )


def _count_hall(cells: _Cells, hall: Hall, question: CountQuestion) -> None:
    name_of = _NAMES.get(question.by)
    everything = question.of == Selection()

    def cell_of(ticket: Ticket) -> _Cell:
        key = (hall.model if name_of is None else name_of(ticket), ticket.priority_class)
        found = cells.get(key)
        if found is None:
            found = cells[key] = _Cell()
        return found

    def of_those(tickets: Sequence[Ticket]) -> Iterable[Ticket]:
        if everything:
            return tickets
        return [each for each in tickets if selects(question.of, hall.model, each)]

    for ticket in of_those(hall.tickets):
        cell_of(ticket).wait(ticket)
    for ticket in of_those(hall.arrived.tickets):
        cell_of(ticket).arrival_per_s += 1 / hall.arrived.within_s
    for ticket in of_those(hall.left.tickets):
        cell_of(ticket).drain_per_s += 1 / hall.left.within_s


def _summed(cells: _Cells, part: int) -> dict[str, _Cell]:
    """Sum cells up over one part of their key."""
    sums: dict[str, _Cell] = {}
    for key, cell in cells.items():
        sums.setdefault(key[part], _Cell()).add(cell)
    return sums


def _sum(cells: Iterable[_Cell]) -> _Cell:
    total = _Cell()
    for cell in cells:
        total.add(cell)
    return total
