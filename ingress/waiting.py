"""Where requests wait while the queue behind is long enough. Rule: late decisions are fair ones.

What stands in JetStream is in order already; what waits here can still be ordered. So requests pass
straight on while REQUESTS holds less than the watermark of their model: twice the slots of its
live workers, since as many may run as wait (10,000 without a worker). Above it they wait in a fair
queue and are let go as the broker's count falls. The count is the broker's own, read more often
near the watermark; what this node let go since is added. Other nodes' requests show with the next
reading, so the watermark holds but for what they let go in between.

Each lane of a model has a gate: what stands in `batch` must not take the place of others.

Who would wait for longer than its patience or deadline, by what was measured (`forecast`), is
refused when it comes. The patience is for the whole wait, until a slot is free.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.workforce import no_workers
from ingress.admission import CLASSES, Bounds, DrainRate, FairQueue, Full, Order, Ticket
from ingress.census import Found, Hall, Pace
from ingress.forecast import Forecast, Reading, retry_after_s
from schemas import subjects
from schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    Draining,
    QueueFull,
    QueueTimeout,
    Refusal,
    RequestCancelled,
    TooManyRequests,
)
from schemas.subjects import Lane
from schemas.waiting import Mark

log = logging.getLogger(__name__)

PATIENCE_S: Final = 30.0
"""How long a request waits here at most."""
WATERMARK_WITHOUT_WORKERS: Final = 10_000
READ_S: Final = 0.01
READ_QUIET_S: Final = 1.0
READ_SHARE: Final = 4
"""A reading that takes long is made more seldom: at most this part of the time is spent on it."""
_ROUNDING_S: Final = 1e-3
_NO_SUBJECTS: Final = 1_000_000_000  # an offset behind all of them: the total alone is sent

Left = Callable[[], Awaitable[None]]
"""Returns once the client has left."""
Turn = asyncio.Future[None]
"""Done when a request may be published, or is refused."""


@dataclass(slots=True)
class _Gate:
    """The queue of one lane of a model, and what stands behind it."""

    queue: FairQueue
    rate: DrainRate = field(default_factory=DrainRate)
    arrived: Pace = field(default_factory=Pace)
    left: Pace = field(default_factory=Pace)
    forecast: Forecast = field(default_factory=Forecast)
    waiting: dict[str, Turn] = field(default_factory=dict)
    counted: int = 0
    let_go: int = 0
    let_go_tokens: int = 0
    landed: int = 0
    landed_before_count: int = 0

    @property
    def behind(self) -> int:
        """How many requests stand in REQUESTS or are on their way there, at most."""
        return self.counted + self.let_go - self.landed_before_count

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to be read or released."""
        return not self.queue.depth and not self.behind

    def pass_on(self, ticket: Ticket) -> None:
        """Count a request that goes on to REQUESTS."""
        self.let_go += 1
        self.let_go_tokens += ticket.cost_tokens


class WaitingRoom:
    """The fair queues of one ingress node; run `release_forever` as a task."""

    def __init__(
        self,
        bus: Bus,
        slots_of: Callable[[str], int],
        *,
        clock: Callable[[], float],
        order: Order = Order.HYBRID,
        bounds: Bounds | None = None,
        patience_s: float = PATIENCE_S,
        watermark_idle: int = WATERMARK_WITHOUT_WORKERS,
    ) -> None:
        """`slots_of` tells how many requests a model's live workers run at once; 0 for none, and
        then `watermark_idle` holds."""
        self.patience_s = patience_s
        self._bus = bus
        self._slots_of = slots_of
        self._clock = clock
        self._order = order
        self._bounds = bounds
        self._gates: dict[tuple[str, Lane], _Gate] = {}
        self._watermark_idle = watermark_idle
        self._look = asyncio.Event()
        self._draining = False

    @property
    def depth(self) -> int:
        """How many requests wait here."""
        return sum(gate.queue.depth for gate in self._gates.values())

    @property
    def prompt_bytes(self) -> int:
        """How many bytes their prompts take."""
        return sum(gate.queue.prompt_bytes for gate in self._gates.values())

    def depths_by_model(self) -> dict[str, int]:
        """How many requests wait for each model that was ever asked for."""
        depths: Counter[str] = Counter()
        for (model, _), gate in self._gates.items():
            depths[model] += gate.queue.depth
        return depths

    def depths_by_class(self) -> dict[str, int]:
        """How many requests of each priority class wait."""
        depths: Counter[str] = Counter(dict.fromkeys(CLASSES, 0))
        for gate in self._gates.values():
            depths.update(gate.queue.depths)
        return dict(depths)

    def oldest_age_s(self) -> float:
        """Since when the oldest of them waits; 0 where none does."""
        first = [next(iter(gate.queue.tickets), None) for gate in self._gates.values()]
        now_s = self._clock()
        return max((now_s - ticket.arrived_s for ticket in first if ticket), default=0.0)

    async def enter(self, model: str, ticket: Ticket, *, left: Left | None = None) -> None:
        """Return when the request may be published; `landed` must follow, whatever comes of it.

        Raises TooManyRequests for the tenant's own bound, QueueFull, QueueTimeout, NoWorkers,
        DeadlineExceeded, Draining, BrokerUnavailable, and RequestCancelled when its client left.
        """
        self.check(model, ticket)
        gate = self._gate(model, ticket.lane)
        if self._open(model, ticket.lane, gate):
            gate.pass_on(ticket)
            if gate.behind * 2 > self._watermark(model, ticket.lane):
                self._look.set()
            return
        await self._wait(gate, ticket, left)

    def check(self, model: str, ticket: Ticket) -> None:
        """Refuse at once who would be refused by `enter`, as far as can be told now.

        Raises Draining, TooManyRequests, QueueFull and QueueTimeout.
        """
        gate = self._gate(model, ticket.lane)
        is_open = self._open(model, ticket.lane, gate)
        if not is_open:
            if self._draining:
                raise Draining("This node is stopping.")
            full = gate.queue.full_for(ticket)
            if full is not None:
                raise self._full(gate, full)
        foresee = partial(gate.forecast.wait_s, now_s=self._clock(), behind=gate.behind)
        allowed_s = ticket.give_up_s - ticket.arrived_s
        if foresee(ahead_tokens=gate.queue.tokens) <= allowed_s or allowed_s <= 0:
            return  # it could wait for all of them; else it is worth finding out for whom it must
        wait_s = foresee(ahead_tokens=gate.queue.ahead_tokens(ticket))
        if wait_s > allowed_s:
            raise self._foreseen(wait_s=wait_s, allowed_s=allowed_s)

    def _foreseen(self, *, wait_s: float, allowed_s: float) -> QueueTimeout:
        self._look.set()
        patient = allowed_s >= self.patience_s - _ROUNDING_S
        bound = f"the {self.patience_s:g} s that it may wait" if patient else "its deadline allows"
        about_s = max(0.1, wait_s)
        return QueueTimeout(
            f"The request would wait for its turn for about {about_s:.1f} s, longer than {bound}.",
            retry_after_s=retry_after_s(wait_s=wait_s, allowed_s=allowed_s),
        )

    def landed(self, model: str, lane: Lane = "online") -> None:
        """Note that a request let go is in REQUESTS, or will never be."""
        self._gates[model, lane].landed += 1

    def withdraw(self, request: str, *, tenant: str) -> None:
        """Let a tenant's request wait no more, whose client has left or which was cancelled."""
        for gate in self._gates.values():
            ticket = gate.queue.ticket(request)
            if ticket is not None and ticket.tenant == tenant:
                self._refuse(gate, request, RequestCancelled("The request was cancelled."))

    def halls(self) -> list[Hall]:
        """Return a copy of what waits for each lane of a model, `online` last, and why."""
        now_s = self._clock()
        return [
            Hall(
                model,
                [*gate.queue.tickets],
                self._mark(model, lane, gate),
                gate.arrived.recent(now_s=now_s),
                gate.left.recent(now_s=now_s),
            )
            for (model, lane), gate in sorted(self._gates.items())
        ]

    def find(self, request: str) -> Found | None:
        """Return where a request waits; None where it does not."""
        for (model, lane), gate in self._gates.items():
            ticket = gate.queue.ticket(request)
            if ticket is not None:
                mark = self._mark(model, lane, gate)
                return Found(model, ticket, mark, gate.queue.ahead_of(ticket))
        return None

    def take_out(
        self, chosen: Callable[[str, Ticket], bool], request: str | None = None
    ) -> list[tuple[Ticket, Turn]]:
        """Take out those that are chosen by model and ticket, or the one with this id if it is;
        whoever takes them refuses their turns."""
        taken = []
        for (model, _), gate in self._gates.items():
            one = None if request is None else gate.queue.ticket(request)
            looked_at = [*gate.queue.tickets] if request is None else [one] if one else []
            for ticket in looked_at:
                if chosen(model, ticket) and (turn := gate.waiting.pop(ticket.request, None)):
                    gate.queue.withdraw(ticket.request)
                    taken.append((ticket, turn))
        return taken

    def _mark(self, model: str, lane: Lane, gate: _Gate) -> Mark:
        bound = self._watermark(model, lane)
        return Mark(slots=self._slots_of(model), watermark=bound, queued=gate.behind)

    def drain(self) -> None:
        """Let nobody wait any more: the node stops."""
        self._draining = True
        for gate in self._gates.values():
            for request in list(gate.waiting):
                self._refuse(gate, request, Draining("This node is stopping."))

    async def release_forever(self) -> None:
        """Read what stands behind, let go what there is room for, refuse who waits too long."""
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            for (model, lane), gate in list(self._gates.items()):
                if not gate.quiet:
                    await self._count(model, lane, gate)
                    self._release(self._watermark(model, lane), gate)
                    self._expire(model, gate)
            took_s = loop.time() - started_s
            await asyncio.sleep(max(READ_S, took_s * READ_SHARE))
            if self._busy():
                continue
            self._look.clear()
            try:
                async with asyncio.timeout(READ_QUIET_S):
                    await self._look.wait()
            except TimeoutError:
                continue

    def _gate(self, model: str, lane: Lane) -> _Gate:
        gate = self._gates.get((model, lane))
        if gate is None:
            queue = FairQueue(order=self._order, bounds=self._bounds)
            gate = self._gates[model, lane] = _Gate(queue)
        return gate

    def _open(self, model: str, lane: Lane, gate: _Gate) -> bool:
        """Tell whether requests pass straight on."""
        return not gate.queue.depth and gate.behind < self._watermark(model, lane)

    def _busy(self) -> bool:
        """Tell whether somebody waits, here or for a slot: the count has to be a fresh one."""
        return any(
            gate.queue.depth or 0 < self._slots_of(model) < gate.behind
            for (model, _), gate in self._gates.items()
        )

    async def _wait(self, gate: _Gate, ticket: Ticket, left: Left | None) -> None:
        full = gate.queue.offer(ticket)
        if full is not None:
            raise self._full(gate, full)
        gate.arrived.note(ticket, now_s=self._clock())
        turn: Turn = asyncio.get_running_loop().create_future()
        gate.waiting[ticket.request] = turn
        self._look.set()
        leaving = None if left is None else asyncio.ensure_future(left())
        try:
            await asyncio.wait(
                {turn} if leaving is None else {turn, leaving},
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not turn.done():
                raise RequestCancelled("The client left while its request waited.")
            turn.result()
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:
                gate.landed += 1  # let go in the very moment in which its client was
            raise
        finally:
            if leaving is not None:
                leaving.cancel()
            turn.cancel()  # whoever took it out finds that nobody waits for its end
            gate.waiting.pop(ticket.request, None)
            gate.queue.withdraw(ticket.request)
            gate.left.note(ticket, now_s=self._clock())

    def _watermark(self, model: str, lane: Lane) -> int:
        slots = self._slots_of(model)
        bound = 2 * slots if lane == "online" else (slots + 1) // 2
        return bound or self._watermark_idle

    async def _count(self, model: str, lane: Lane, gate: _Gate) -> None:
        landed = gate.landed
        those = subjects.requests_of(model=model, lane=lane)
        query = {"subjects_filter": those, "offset": _NO_SUBJECTS}
        try:
            info = await self._bus.api(f"STREAM.INFO.{subjects.REQUESTS}", query)
        except (BrokerAway, BrokerRefused) as error:
            log.debug("the queue cannot be counted: %s", error)
            return
        gate.counted = info.get("total", 0)
        gate.landed_before_count = landed
        state = info["state"]
        gate.forecast.read(
            Reading(
                now_s=self._clock(),
                slots=self._slots_of(model),
                behind=gate.behind,
                ended=state["last_seq"] - state["messages"],
                waiting=gate.queue.depth,
                let_go=gate.let_go,
                let_go_tokens=gate.let_go_tokens,
            )
        )

    def _release(self, watermark: int, gate: _Gate) -> None:
        now_s = self._clock()
        while gate.behind < watermark:
            ticket = gate.queue.next()
            if ticket is None:
                return
            turn = gate.waiting.pop(ticket.request)
            if turn.done():
                continue
            turn.set_result(None)
            gate.pass_on(ticket)
            gate.rate.left(now_s=now_s)

    def _expire(self, model: str, gate: _Gate) -> None:
        for ticket in gate.queue.expire(now_s=self._clock()):
            self._refuse(gate, ticket.request, self._too_late(model, gate, ticket))

    def _refuse(self, gate: _Gate, request: str, refusal: Refusal) -> None:
        turn = gate.waiting.pop(request, None)
        if turn is not None and not turn.done():
            turn.set_exception(refusal)

    def _too_late(self, model: str, gate: _Gate, ticket: Ticket) -> Refusal:
        waited_s = ticket.give_up_s - ticket.arrived_s
        if not self._bus.connected:
            return BrokerUnavailable("The queue cannot be reached.")
        if not self._slots_of(model):
            return no_workers(model)
        if waited_s < self.patience_s - _ROUNDING_S:
            return DeadlineExceeded("The request's deadline has passed while it waited.")
        return QueueTimeout(
            f"The request waited {waited_s:.0f} s for its turn.",
            retry_after_s=self._retry_after_s(gate),
        )

    def _full(self, gate: _Gate, full: Full) -> Refusal:
        retry_after_s = self._retry_after_s(gate)
        if full is Full.TENANT:
            return TooManyRequests(
                "Your limit of waiting requests is reached.", retry_after_s=retry_after_s
            )
        return QueueFull("The queue is full; try again later.", retry_after_s=retry_after_s)

    def _retry_after_s(self, gate: _Gate) -> int:
        return gate.rate.wait_s(gate.queue.depth, now_s=self._clock())
