"""Where requests wait while the queue behind is long enough. Rule: late decisions are fair ones.

What stands in JetStream is in order already; what waits here can still be ordered. So requests pass
straight on while REQUESTS holds less than the watermark of their model: twice the slots of its
live workers, since as many may run as wait (10,000 without a worker). Above it they wait in a fair
queue and are let go as the broker's count falls. The count is the broker's own, read more often
near the watermark; what this node let go since is added. Other nodes' requests show with the next
reading, so the watermark holds but for what they let go in between. Where slots become free so
seldom that those above them would stand there for long, fewer may: else these alone used up
everybody's patience, and who comes most often took each place that becomes free.

Each lane of a model has a door: what stands in `batch` must not take the place of others.

Who would wait for longer than its patience or deadline, by what was measured (`forecast`), is
refused when it comes. The patience is for the whole wait, until a slot is free.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.workforce import no_workers
from ingress.admission import CLASSES, FairQueue, Order, Ticket
from ingress.census import Found, Hall
from ingress.door import Door
from ingress.forecast import retry_after_s
from ingress.holding import Bounds, Full, Holding
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
STANDING_SHARE: Final = 0.25
"""So much of its patience a request may stand in JetStream before a slot is free, about."""
STANDING_S_MIN: Final = 0.1
"""Some readings of the queue: between two of them slots must not run empty."""
READ_S: Final = 0.01
READ_QUIET_S: Final = 1.0
READ_SHARE: Final = 4
"""A reading that takes long is made more seldom: at most this part of the time is spent on it, or
what leaves `READ_QUIET_S` between two: a broker without a leader answers none for seconds."""
EXPIRE_S: Final = 0.1
"""How often those who have waited too long are looked for while a reading takes its time."""
_ROUNDING_S: Final = 1e-3
_NO_SUBJECTS: Final = 1_000_000_000  # an offset behind all of them: the total alone is sent

Left = Callable[[], Awaitable[None]]
"""Returns once the client has left."""
Turn = asyncio.Future[None]
"""Done when a request may be published, or is refused."""


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
        self._holding = Holding(bounds or Bounds())
        self._doors: dict[tuple[str, Lane], Door] = {}
        self._turns: dict[str, Turn] = {}
        self._watermark_idle = watermark_idle
        self._look = asyncio.Event()
        self._draining = False

    @property
    def depth(self) -> int:
        """How many requests wait here."""
        return self._holding.total.requests

    @property
    def prompt_bytes(self) -> int:
        """How many bytes their prompts take."""
        return self._holding.total.prompt_bytes

    def depths_by_model(self) -> dict[str, int]:
        """How many requests wait for each model that was ever asked for."""
        depths: Counter[str] = Counter()
        for (model, _), door in self._doors.items():
            depths[model] += door.queue.depth
        return depths

    def depths_by_class(self) -> dict[str, int]:
        """How many requests of each priority class wait."""
        depths: Counter[str] = Counter(dict.fromkeys(CLASSES, 0))
        for door in self._doors.values():
            depths.update(door.queue.depths)
        return dict(depths)

    def oldest_age_s(self) -> float:
        """Since when the oldest of them waits; 0 where none does."""
        first = [next(iter(door.queue.tickets), None) for door in self._doors.values()]
        now_s = self._clock()
        return max((now_s - ticket.arrived_s for ticket in first if ticket), default=0.0)

    async def enter(self, model: str, ticket: Ticket, *, left: Left | None = None) -> None:
        """Return when the request may be published; `landed` must follow, whatever comes of it.

        Raises TooManyRequests for the tenant's own bound, QueueFull, QueueTimeout, NoWorkers,
        DeadlineExceeded, Draining, BrokerUnavailable, and RequestCancelled when its client left.
        """
        self.check(model, ticket)
        door = self._door(model, ticket.lane)
        watermark = self._watermark(model, ticket.lane, door)
        if door.is_open(watermark):
            door.pass_on(ticket)
            if door.behind * 2 > watermark:
                self._look.set()
            return
        await self._wait(door, ticket, left)

    def check(self, model: str, ticket: Ticket) -> None:
        """Refuse at once who would be refused by `enter`, as far as can be told now.

        Raises Draining, TooManyRequests, QueueFull and QueueTimeout.
        """
        door = self._door(model, ticket.lane)
        now_s = self._clock()
        if not door.is_open(self._watermark(model, ticket.lane, door)):
            if self._draining:
                raise Draining("This node is stopping.")
            full = door.queue.full_for(ticket)
            if full is not None:
                raise self._full(door, full)
        wait_s = door.foreseen_s(ticket, slots=self._slots_of(model), now_s=now_s)
        if wait_s is not None:
            raise self._foreseen(wait_s=wait_s, allowed_s=ticket.give_up_s - ticket.arrived_s)

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
        self._doors[model, lane].landed += 1

    def withdraw(self, request: str, *, tenant: str) -> None:
        """Let a tenant's request wait no more, whose client has left or which was cancelled."""
        for door in self._doors.values():
            ticket = door.queue.ticket(request)
            if ticket is not None and ticket.tenant == tenant:
                self._refuse(door, request, RequestCancelled("The request was cancelled."))

    def halls(self) -> list[Hall]:
        """Return a copy of what waits for each lane of a model, `online` last, and why."""
        now_s = self._clock()
        return [
            Hall(
                model,
                [*door.queue.tickets],
                self._mark(model, lane, door),
                door.arrived.recent(now_s=now_s),
                door.left.recent(now_s=now_s),
            )
            for (model, lane), door in sorted(self._doors.items())
        ]

    def find(self, request: str) -> Found | None:
        """Return where a request waits; None where it does not."""
        for (model, lane), door in self._doors.items():
            ticket = door.queue.ticket(request)
            if ticket is not None:
                mark = self._mark(model, lane, door)
                return Found(model, ticket, mark, door.queue.ahead_of(ticket))
        return None

    def take_out(
        self, chosen: Callable[[str, Ticket], bool], request: str | None = None
    ) -> list[tuple[Ticket, Turn]]:
        """Take out those that are chosen by model and ticket, or the one with this id if it is;
        whoever takes them refuses their turns."""
        taken = []
        for (model, _), door in self._doors.items():
            one = None if request is None else door.queue.ticket(request)
            looked_at = [*door.queue.tickets] if request is None else [one] if one else []
            for ticket in looked_at:
                if chosen(model, ticket) and (turn := self._turns.pop(ticket.request, None)):
                    door.queue.withdraw(ticket.request)
                    taken.append((ticket, turn))
        return taken

    def _mark(self, model: str, lane: Lane, door: Door) -> Mark:
        bound = self._watermark(model, lane, door)
        return Mark(slots=self._slots_of(model), watermark=bound, queued=door.behind)

    def drain(self) -> None:
        """Let nobody wait any more: the node stops."""
        self._draining = True
        for door in self._doors.values():
            for ticket in list(door.queue.tickets):
                self._refuse(door, ticket.request, Draining("This node is stopping."))

    async def release_forever(self) -> None:
        """Read what stands behind, let go what there is room for, refuse who waits too long."""
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            await self._read()
            took_s = loop.time() - started_s
            await asyncio.sleep(min(max(READ_S, took_s * READ_SHARE), READ_QUIET_S))
            if self._busy():
                continue
            self._look.clear()
            try:
                async with asyncio.timeout(READ_QUIET_S):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def _read(self) -> None:
        """Read all counts at once, and let nobody wait too long for that."""
        readings = {
            asyncio.create_task(self._read_one(model, lane, door))
            for (model, lane), door in self._doors.items()
            if not door.quiet
        }
        try:
            while readings:
                done, readings = await asyncio.wait(readings, timeout=EXPIRE_S)
                for reading in done:
                    reading.result()
                for (model, _), door in self._doors.items():
                    self._expire(model, door)
        finally:
            for reading in readings:
                reading.cancel()

    async def _read_one(self, model: str, lane: Lane, door: Door) -> None:
        await self._count(model, lane, door)
        self._release(self._watermark(model, lane, door), door)

    def _door(self, model: str, lane: Lane) -> Door:
        door = self._doors.get((model, lane))
        if door is None:
            queue = FairQueue(order=self._order, holding=self._holding)
            door = self._doors[model, lane] = Door(queue)
        return door

    def _busy(self) -> bool:
        """Tell whether somebody waits, here or for a slot: the count has to be a fresh one."""
        return any(
            door.queue.depth or 0 < self._slots_of(model) < door.behind
            for (model, _), door in self._doors.items()
        )

    async def _wait(self, door: Door, ticket: Ticket, left: Left | None) -> None:
        full = door.queue.offer(ticket)
        if full is not None:
            raise self._full(door, full)
        door.arrived.note(ticket, now_s=self._clock())
        turn: Turn = asyncio.get_running_loop().create_future()
        self._turns[ticket.request] = turn
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
                door.landed += 1  # let go in the very moment in which its client was
            raise
        finally:
            if leaving is not None:
                leaving.cancel()
            turn.cancel()  # whoever took it out finds that nobody waits for its end
            self._turns.pop(ticket.request, None)
            door.queue.withdraw(ticket.request)
            door.left.note(ticket, now_s=self._clock())

    def _watermark(self, model: str, lane: Lane, door: Door) -> int:
        slots = self._slots_of(model)
        most = 2 * slots if lane == "online" else (slots + 1) // 2
        standing_s = max(STANDING_S_MIN, STANDING_SHARE * self.patience_s)
        return door.watermark(
            most or self._watermark_idle, slots=slots, standing_s=standing_s, now_s=self._clock()
        )

    async def _count(self, model: str, lane: Lane, door: Door) -> None:
        landed = door.landed
        those = subjects.requests_of(model=model, lane=lane)
        query = {"subjects_filter": those, "offset": _NO_SUBJECTS}
        try:
            info = await self._bus.api(f"STREAM.INFO.{subjects.REQUESTS}", query)
        except (BrokerAway, BrokerRefused) as error:
            log.debug("the queue cannot be counted: %s", error)
            return
        state = info["state"]
        door.count(
            info.get("total", 0),
            ended=state["last_seq"] - state["messages"],
            landed=landed,
            slots=self._slots_of(model),
            now_s=self._clock(),
        )

    def _release(self, watermark: int, door: Door) -> None:
        for ticket in door.release(watermark, now_s=self._clock()):
            self._turns.pop(ticket.request).set_result(None)

    def _expire(self, model: str, door: Door) -> None:
        for ticket in door.queue.expire(now_s=self._clock()):
            self._refuse(door, ticket.request, self._too_late(model, door, ticket))

    def _refuse(self, door: Door, request: str, refusal: Refusal) -> None:
        """Take a request out and tell it why, in one go: what is refused must not be let go."""
        door.queue.withdraw(request)
        turn = self._turns.pop(request, None)
        if turn is not None:
            turn.set_exception(refusal)

    def _too_late(self, model: str, door: Door, ticket: Ticket) -> Refusal:
        waited_s = ticket.give_up_s - ticket.arrived_s
        if not self._bus.connected:
            return BrokerUnavailable("The queue cannot be reached.")
        if not self._slots_of(model):
            return no_workers(model)
        if waited_s < self.patience_s - _ROUNDING_S:
            return DeadlineExceeded("The request's deadline has passed while it waited.")
        return QueueTimeout(
            f"The request waited {waited_s:.0f} s for its turn.",
            retry_after_s=door.retry_after_s(now_s=self._clock()),
        )

    def _full(self, door: Door, full: Full) -> Refusal:
        retry_after_s = door.retry_after_s(now_s=self._clock())
        if full is Full.TENANT:
            return TooManyRequests(
                "Your limit of waiting requests is reached.", retry_after_s=retry_after_s
            )
        return QueueFull("The queue is full; try again later.", retry_after_s=retry_after_s)
