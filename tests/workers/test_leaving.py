"""A worker that is told to stop while its last request ends."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest

from headrace import topology
from headrace.bus import Bus, BusSettings
from headrace.kept import kept
from schemas.subjects import (
    HoldsQuestion,
    RequestSubject,
    consumer_name,
    worker_holds,
)
from schemas.wire import Envelope, SimHook, encode_envelope
from tests.broker import with_bus
from tests.queue import pull, simulated
from tests.servers import NatsServer
from tests.waiting import until
from workers import leaving
from workers.engine import Emit, Finish, Work
from workers.engine_sim import SimulatedEngine
from workers.intake import deliveries
from workers.lease import Leases
from workers.worker import Worker

PIECES = tuple(f"{number} " for number in range(20))


def _envelope(*, hang_at: int | None = None) -> Envelope:
    hook = SimHook(pieces=PIECES, itl_ms=20.0, ttft_ms=0.0, hang_at=hang_at)
    return simulated(hook, max_tokens=len(PIECES), keep_answer=True)


class SlowToAbort(SimulatedEngine):
    """An engine that takes a while to stop a request."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = asyncio.Event()

    async def generate(self, work: Work, emit: Emit) -> Finish:
        try:
            return await super().generate(work, emit)
        finally:
            await self.aborted.wait()


async def _running(bus: Bus, url: str, stack: AsyncExitStack, engine: SimulatedEngine) -> Worker:
    """Run a worker until the stack unwinds."""
    await topology.apply(bus)
    card = await engine.start()
    await topology.apply_model(bus, card.name, partitions=card.partitions)
    leases = Leases(BusSettings(url), name="stopping")
    worker = Worker(bus, engine, card, leases, name="stopping")
    leases.start()
    stack.callback(leases.stop)
    await worker.start()
    for work in (worker.intake.pump, worker.beat_forever):
        stack.callback(asyncio.create_task(work()).cancel)
    return worker


def test_it_keeps_and_acknowledges_what_has_ended_before_it_is_gone(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "ENDING_S", 60.0)
    envelope = _envelope()
    subject = RequestSubject("online", "sim", 3, "t", envelope.request)

    async def test(bus: Bus) -> None:
        async with AsyncExitStack() as stack:
            engine = SimulatedEngine()
            worker = await _running(bus, own_nats.url, stack, engine)
            await bus.store(str(subject), encode_envelope(envelope))
            await until(lambda: envelope.request in engine.ledger())
            await worker.drain(grace_s=60)
        assert await kept(bus, tenant="t", request=envelope.request)

        async def acknowledged() -> bool:
            info = await bus.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
            return not info["state"].get("subjects")

        await until(acknowledged)

    with_bus(own_nats.url, test)


def test_what_comes_once_it_has_stopped_is_left_to_others(own_nats: NatsServer) -> None:
    envelope = _envelope()
    subject = RequestSubject("online", "sim", 3, "t", envelope.request)

    async def test(bus: Bus) -> None:
        async with AsyncExitStack() as stack:
            worker = await _running(bus, own_nats.url, stack, SimulatedEngine())
            name = consumer_name(subject.lane, subject.model, subject.partition)

            async def is_asked() -> bool:
                info = await bus.api(f"CONSUMER.INFO.REQUESTS.{name}")
                return bool(info["num_waiting"])

            await until(is_asked)
            await worker.drain(grace_s=60)
            await bus.store(str(subject), encode_envelope(envelope))
            [given] = await pull(bus, 1, model="sim", partition=3)
            assert deliveries(given.reply)[0] == 1

    with_bus(own_nats.url, test)


def test_what_is_given_back_is_not_taken_again_while_the_engine_stops_it(
    own_nats: NatsServer,
) -> None:
    envelope = _envelope(hang_at=1)
    subject = RequestSubject("online", "sim", 3, "t", envelope.request)

    async def test(bus: Bus) -> None:
        async with AsyncExitStack() as stack:
            engine = SlowToAbort()
            stack.callback(engine.aborted.set)
            worker = await _running(bus, own_nats.url, stack, engine)
            await bus.store(str(subject), encode_envelope(envelope))
            await until(lambda: any(each.next_seq for each in worker.generations))
            stopping = asyncio.create_task(worker.drain(grace_s=0))
            [given] = await pull(bus, 1, model="sim", partition=3)
            question = msgspec.json.encode(HoldsQuestion(envelope.request, given.reply))
            answer = await bus.request(worker_holds(worker.name), question, timeout_s=30)
            assert (worker.held, answer) == (1, b"no")
            engine.aborted.set()
            await stopping

    with_bus(own_nats.url, test)
