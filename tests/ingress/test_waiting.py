"""The room before the queue: open below the watermark, fair above it, and nobody is forgotten."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from headrace import topology
from headrace.bus import BrokerAway, Bus
from ingress.admission import Order, Ticket
from ingress.holding import Bounds
from ingress.waiting import WaitingRoom
from schemas import subjects
from schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    Draining,
    NoWorkers,
    QueueFull,
    QueueTimeout,
    Refusal,
    RequestCancelled,
    TooManyRequests,
)
from schemas.subjects import RequestSubject, new_request_id
from schemas.tenant import PriorityClass, lane_of
from tests.broker import answers, with_bus
from tests.servers import NatsServer, freeze
from tests.waiting import until

_models = itertools.count()


class Line:
    """One model's requests, from the room into the queue."""

    def __init__(self, bus: Bus, room: WaitingRoom, model: str) -> None:
        self.passed: list[str] = []
        self._bus = bus
        self._room = room
        self._model = model
        self._stored: list[str] = []

    async def ask(
        self,
        tenant: str = "a",
        *,
        patience_s: float | None = None,
        tenant_max: int | None = None,
        left: Callable[[], Awaitable[None]] | None = None,
        of_class: PriorityClass = "standard",
    ) -> None:
        """Go through the room and into the queue. Raises a Refusal."""
        now_s = time.monotonic()
        give_up_s = now_s + (self._room.patience_s if patience_s is None else patience_s)
        request = new_request_id()
        lane = lane_of(of_class)
        ticket = Ticket(
            *(request, tenant, of_class, 1, 100, 10, 10, now_s, give_up_s, tenant_max), lane=lane
        )
        await self._room.enter(self._model, ticket, left=left)
        subject = str(RequestSubject(lane, self._model, 0, tenant, request))
        await self._bus.store(subject, b"")
        self._room.landed(self._model, lane)
        self.passed.append(tenant)
        self._stored.append(subject)

    async def end_one(self) -> None:
        """Take the oldest request out of the queue, as a worker's acknowledgement does."""
        await self._bus.purge(subjects.REQUESTS, self._stored.pop(0))


@asynccontextmanager
async def line(
    bus: Bus,
    *,
    slots: int = 1,
    order: Order = Order.FCFS,
    bounds: Bounds | None = None,
    patience_s: float = 30.0,
) -> AsyncIterator[tuple[Line, WaitingRoom]]:
    await topology.apply(bus)
    model = f"waiting-{next(_models)}-{time.time_ns()}"
    room = WaitingRoom(
        bus,
        lambda name: slots if name == model else 0,
        clock=time.monotonic,
        order=order,
        bounds=bounds,
        patience_s=patience_s,
    )
    releasing = asyncio.create_task(room.release_forever())
    try:
        yield Line(bus, room, model), room
    finally:
        releasing.cancel()
        with suppress(asyncio.CancelledError):
            await releasing
        await bus.purge(subjects.REQUESTS, subjects.requests_of(model=model))


def test_twice_the_slots_pass_and_the_rest_wait_until_there_is_room(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus, slots=2) as (asking, room):
            tasks = [asyncio.create_task(asking.ask()) for _ in range(10)]
            await until(lambda: len(asking.passed) == 4)
            assert room.depth == 6
            for left in range(5, -1, -1):
                await asking.end_one()
                await until(lambda left=left: room.depth == left)  # type: ignore[misc]
            await asyncio.gather(*tasks)

    with_bus(nats_url, run)


def test_what_waits_in_lane_batch_takes_no_place_of_others_and_others_none_of_it(
    nats_url: str,
) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus, slots=4) as (asking, room):
            tasks = [asyncio.create_task(asking.ask("b", of_class="batch")) for _ in range(30)]
            await until(lambda: asking.passed.count("b") == 2)
            assert room.depth == 28
            tasks += [asyncio.create_task(asking.ask("a")) for _ in range(20)]
            await until(lambda: asking.passed.count("a") == 8)
            assert room.depth == 40
            await asking.end_one()  # one of batch: it came first
            await until(lambda: asking.passed.count("b") == 3)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    with_bus(nats_url, run)


def test_a_quiet_tenant_goes_next_whatever_a_loud_one_has_waiting(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus) as (asking, room):
            tasks = [asyncio.create_task(asking.ask("loud")) for _ in range(100)]
            await until(lambda: room.depth == 98)
            await until(lambda: len(asking.passed) == 2)
            tasks.append(asyncio.create_task(asking.ask("quiet")))
            await until(lambda: room.depth == 99)
            for _ in range(2):
                before = len(asking.passed)
                await asking.end_one()
                await until(lambda before=before: len(asking.passed) > before)  # type: ignore[misc]
            assert "quiet" in asking.passed
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert room.depth == 0

    with_bus(nats_url, run)


async def _fill(asking: Line, room: WaitingRoom, slots: int = 1) -> None:
    for _ in range(2 * slots):
        await asking.ask(patience_s=60)
    assert room.depth == 0


async def _refusal(asked: Awaitable[None]) -> type[Refusal]:
    with pytest.raises(Refusal) as caught:
        await asked
    if caught.value.retryable:
        assert caught.value.retry_after_s is not None
    return caught.type


@pytest.mark.parametrize(
    ("slots", "patience_s", "expected"),
    [(1, None, QueueTimeout), (1, 0.05, DeadlineExceeded)],
)
def test_who_waits_too_long_is_told_why(
    nats_url: str, slots: int, patience_s: float | None, expected: type[Refusal]
) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus, slots=slots, patience_s=0.1) as (asking, room):
            await _fill(asking, room)
            assert await _refusal(asking.ask(patience_s=patience_s)) is expected
            assert room.depth == 0

    with_bus(nats_url, run)


def test_who_waited_for_workers_that_are_all_gone_hears_that_there_is_none(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        slots = 1
        await topology.apply(bus)
        room = WaitingRoom(
            bus, lambda name: slots, clock=time.monotonic, patience_s=0.2, watermark_idle=1
        )
        asking = Line(bus, room, f"lost-{time.time_ns()}")
        await _fill(asking, room)
        slots = 0
        releasing = asyncio.create_task(room.release_forever())
        assert await _refusal(asking.ask()) is NoWorkers
        releasing.cancel()

    with_bus(nats_url, run)


def test_bounds_refuse_at_once_and_say_whose_they_are(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus, bounds=Bounds(requests_max=4)) as (asking, room):
            await _fill(asking, room)
            waiting = [asyncio.create_task(asking.ask("a", tenant_max=3)) for _ in range(3)]
            await until(lambda: room.depth == 3)
            assert await _refusal(asking.ask("a", tenant_max=3)) is TooManyRequests
            waiting.append(asyncio.create_task(asking.ask("b")))
            await until(lambda: room.depth == 4)
            assert await _refusal(asking.ask("b")) is QueueFull
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    with_bus(nats_url, run)


def test_a_client_that_leaves_frees_its_place(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus) as (asking, room):
            await _fill(asking, room)
            gone = asyncio.Event()

            async def left() -> None:
                await gone.wait()

            waiting = asyncio.create_task(_refusal(asking.ask(left=left)))
            await until(lambda: room.depth == 1)
            gone.set()
            assert await waiting is RequestCancelled
            assert room.depth == 0
            await asking.end_one()
            await asking.ask()

    with_bus(nats_url, run)


def test_who_is_cancelled_is_out_at_once_and_cannot_be_let_go(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus) as (asking, room):
            await _fill(asking, room)
            waiting = asyncio.create_task(_refusal(asking.ask("a")))
            await until(lambda: room.depth == 1)
            [hall] = room.halls()
            room.withdraw(hall.tickets[0].request, tenant="b")
            assert room.depth == 1
            room.withdraw(hall.tickets[0].request, tenant="a")
            assert room.depth == 0
            assert await waiting is RequestCancelled

    with_bus(nats_url, run)


def test_a_stopping_node_sends_all_who_wait_elsewhere(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus) as (asking, room):
            await _fill(asking, room)
            waiting = [asyncio.create_task(_refusal(asking.ask())) for _ in range(3)]
            await until(lambda: room.depth == 3)
            room.drain()
            assert room.depth == 0  # none of them can be let go any more
            assert set(await asyncio.gather(*waiting)) == {Draining}
            assert await _refusal(asking.ask()) is Draining

    with_bus(nats_url, run)


def test_without_broker_who_waits_is_told_so(own_nats: NatsServer) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        room = WaitingRoom(bus, lambda name: 1, clock=time.monotonic, patience_s=0.2)
        asking = Line(bus, room, "away")
        await _fill(asking, room)
        waiting = asyncio.create_task(_refusal(asking.ask()))
        await until(lambda: room.depth == 1)
        own_nats.stop()
        await until(lambda: not bus.connected)
        releasing = asyncio.create_task(room.release_forever())
        assert await waiting is BrokerUnavailable
        releasing.cancel()

    with_bus(own_nats.url, run)


def test_who_waits_too_long_is_told_so_while_no_count_can_be_had(own_nats: NatsServer) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        room = WaitingRoom(bus, lambda name: 1, clock=time.monotonic, patience_s=0.2)
        models = [Line(bus, room, name) for name in ("one", "two", "three")]
        for asking in models:
            await _fill(asking, room)
        freeze(own_nats.pid)
        try:
            waiting = [asyncio.create_task(_refusal(asking.ask())) for asking in models]
            await until(lambda: room.depth == 3)
            releasing = asyncio.create_task(room.release_forever())
            unanswered = asyncio.create_task(bus.api("STREAM.INFO.REQUESTS", timeout_s=60))
            assert set(await asyncio.gather(*waiting)) == {QueueTimeout}
            assert not unanswered.done()
        finally:
            os.kill(own_nats.pid, signal.SIGCONT)
        await unanswered
        releasing.cancel()

    with_bus(own_nats.url, run)


@pytest.mark.slow
def test_who_waits_is_let_go_soon_after_a_count_that_nobody_answered(
    own_nats: NatsServer,
) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus) as (asking, room):
            await _fill(asking, room)
            waiting = asyncio.create_task(asking.ask(patience_s=600))
            await until(lambda: room.depth == 1)
            freeze(own_nats.pid)
            try:
                with pytest.raises(BrokerAway):
                    await bus.api("STREAM.INFO.REQUESTS")
            finally:
                os.kill(own_nats.pid, signal.SIGCONT)
            await until(lambda: answers(bus))
            await asking.end_one()
            await until(waiting.done)
            await waiting

    with_bus(own_nats.url, run)


def test_without_workers_the_queue_behind_takes_ten_thousand(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus, slots=0) as (asking, room):
            await asyncio.gather(*[asking.ask() for _ in range(50)])
            assert room.depth == 0

    with_bus(nats_url, run)


def test_who_would_wait_too_long_is_refused_at_once_until_the_backlog_is_gone(
    nats_url: str,
) -> None:
    async def run(bus: Bus) -> None:
        async with line(bus, slots=2, patience_s=600.0) as (asking, room):
            tasks = [asyncio.create_task(asking.ask()) for _ in range(80)]
            await until(lambda: room.depth == 76)
            await until(lambda: len(asking.passed) == 4)

            async def refused(patience_s: float = 0.01) -> type[Refusal] | None:
                try:
                    await asking.ask(patience_s=patience_s)
                except Refusal as refusal:
                    return type(refusal)
                return None

            assert await refused() is DeadlineExceeded  # nothing was measured: it waited

            async def end_one() -> None:
                before = len(asking.passed)
                await asking.end_one()
                await until(lambda: len(asking.passed) > before)

            for _ in range(18):
                await end_one()
            # What ends between readings that took long is not measured.
            while await refused() is not QueueTimeout:
                await end_one()
            while room.depth:
                await end_one()
            await asyncio.gather(*tasks)
            for _ in range(2):  # none waits for a slot any more
                await asking.end_one()

            async def passed() -> bool:
                return await refused(patience_s=5) is None

            await until(passed)

    with_bus(nats_url, run)
