"""What waits in this node, counted. Rule: pure; what is asked is found by looking at all of it.

Nothing is kept up to date for operators but who passed of late: at the bounds of the queue a look
takes milliseconds, and only while somebody asks.
"""

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from ingress.admission import CLASSES, Ticket
from schemas.waiting import ROWS_MAX, Count, CountAnswer, CountQuestion, Mark, Selection

WINDOW_S: Final = 10.0
"""What rates are taken over."""
PASSED_MAX: Final = 4096
"""Of how many that passed a rate is known; at higher rates it is taken over a shorter time."""
_SPAN_S_MIN: Final = 0.1


class Pace:
    """Who passed a point of late; pure, with time as an argument."""

    def __init__(self) -> None:
        self._passed: deque[tuple[float, Ticket]] = deque(maxlen=PASSED_MAX)

    def note(self, ticket: Ticket, *, now_s: float) -> None:
        """Note that a request has passed."""
        self._passed.append((now_s, ticket))

    def recent(self, *, now_s: float) -> tuple[list[Ticket], float]:
        """Return who passed within the window, and in how many seconds."""
        whole = len(self._passed) < PASSED_MAX
        while self._passed and now_s - self._passed[0][0] > WINDOW_S:
            whole = True
            self._passed.popleft()
        span_s = WINDOW_S if whole else now_s - self._passed[0][0]
        return [ticket for _, ticket in self._passed], max(span_s, _SPAN_S_MIN)


class Hall(NamedTuple):
    """One model's waiting requests, what keeps them, and who came and left."""

    model: str
    tickets: Collection[Ticket]
    mark: Mark
    arrived: Pace
    left: Pace


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
        _count_hall(cells, hall, question, now_s=now_s)
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


def _count_hall(cells: _Cells, hall: Hall, question: CountQuestion, *, now_s: float) -> None:
    def cell_of(ticket: Ticket) -> _Cell:
        key = (_name(question, hall.model, ticket), ticket.priority_class)
        found = cells.get(key)
        if found is None:
            found = cells[key] = _Cell()
        return found

    for ticket in hall.tickets:
        if selects(question.of, hall.model, ticket):
            cell_of(ticket).wait(ticket)
    arrived, span_s = hall.arrived.recent(now_s=now_s)
    for ticket in arrived:
        if selects(question.of, hall.model, ticket):
            cell_of(ticket).arrival_per_s += 1 / span_s
    left, span_s = hall.left.recent(now_s=now_s)
    for ticket in left:
        if selects(question.of, hall.model, ticket):
            cell_of(ticket).drain_per_s += 1 / span_s


def _name(question: CountQuestion, model: str, ticket: Ticket) -> str:
    match question.by:
        case "lane":
            return ticket.lane
        case "model":
            return model
        case "partition":
            return str(ticket.partition)
        case "tenant":
            return ticket.tenant


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
