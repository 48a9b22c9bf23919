"""A worker that stood still, and must find out whether others run what it holds."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace import topology
from headrace.bus import Bus, BusSettings, connection
from headrace.messages import Message
from schemas import subjects
from schemas.subjects import RequestSubject
from schemas.wire import SimHook, encode_envelope
from tests.queue import simulated
from tests.servers import NatsServer
from tests.waiting import until
from workers.engine_sim import SimulatedEngine
from workers.lease import Leases
from workers.worker import STALL_S, Worker

HELD = 20
UNANSWERED = """
authorization: { users: [
  { user: all, password: x }
  { user: worker, password: x, permissions: { publish: { deny: "$JS.API.DIRECT.GET.REPLIES" } } }
] }
"""
"""The worker's questions about the log stay without an answer, as where it has no leader."""


async def _connected(stack: AsyncExitStack, server: NatsServer, user: str) -> tuple[Bus, str]:
    url = f"nats://{user}:x@127.0.0.1:{server.port}"
    return await stack.enter_async_context(
        connection(BusSettings(url), name=user, timeout_s=10)
    ), url


@pytest.mark.slow
def test_its_heart_beats_while_the_log_does_not_say_what_others_run(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, config=UNANSWERED)
    beats: list[Message] = []

    async def heard(message: Message) -> None:
        beats.append(message)

    async def test() -> None:
        async with AsyncExitStack() as stack:
            bus, _ = await _connected(stack, server, "all")
            await topology.apply(bus)
            engine = SimulatedEngine()
            card = await engine.start()
            await topology.apply_model(bus, card.name, partitions=card.partitions)
            own, url = await _connected(stack, server, "worker")
            leases = Leases(BusSettings(url), name="still")
            worker = Worker(own, engine, card, leases, name="still")
            leases.start()
            stack.callback(leases.stop)
            await worker.start()
            for work in (worker.intake.pump, worker.beat_forever):
                stack.callback(asyncio.create_task(work()).cancel)
            for number in range(HELD):
                envelope = simulated(SimHook(hang_at=0))
                subject = RequestSubject("online", "sim", number, "t", envelope.request)
                await bus.store(str(subject), encode_envelope(envelope))
            await until(lambda: sum(each.attempt > 0 for each in worker.generations) == HELD)
            await bus.subscribe(f"$KV.{subjects.WORKERS}.still", heard)
            time.sleep(STALL_S + 1)  # noqa: ASYNC251 - all of its process
            beats.clear()
            await until(lambda: len(beats) >= 3)

    server.start()
    try:
        asyncio.run(test())
    finally:
        server.stop()
