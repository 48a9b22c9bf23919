"""A worker that is told to stop while its last request ends."""

import asyncio
import time
from contextlib import AsyncExitStack

from headrace import topology
from headrace.bus import Bus, BusSettings
from headrace.kept import kept
from schemas.subjects import RequestSubject, new_request_id
from schemas.wire import Envelope, Sampling, Shape, SimHook, encode_envelope, pack_tokens
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until
from workers.engine_sim import SimulatedEngine
from workers.lease import Leases
from workers.worker import Worker

PIECES = tuple(f"{number} " for number in range(20))


def _envelope() -> Envelope:
    request = new_request_id()
    return Envelope(
        request=request,
        tenant="t",
        model="sim",
        reply=f"replies.s.t.{request}",
        prompt=pack_tokens([1]),
        sampling=Sampling(max_tokens=len(PIECES)),
        shape=Shape("chat", "sim", 5, False, 1, False),
        deadline_s=time.time() + 60,
        sim=SimHook(pieces=PIECES, itl_ms=20.0, ttft_ms=0.0),
        keep_answer=True,
    )


def test_it_keeps_and_acknowledges_what_has_ended_before_it_is_gone(own_nats: NatsServer) -> None:
    envelope = _envelope()
    subject = RequestSubject("online", "sim", 3, "t", envelope.request)

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        engine = SimulatedEngine()
        card = await engine.start()
        await topology.apply_model(bus, card.name, partitions=card.partitions)
        leases = Leases(BusSettings(own_nats.url), name="stopping")
        worker = Worker(bus, engine, card, leases, name="stopping")
        async with AsyncExitStack() as stack:
            leases.start()
            stack.callback(leases.stop)
            await worker.start()
            for work in (worker.intake.pump, worker.beat_forever):
                stack.callback(asyncio.create_task(work()).cancel)
            await bus.store(str(subject), encode_envelope(envelope))
            await until(lambda: envelope.request in engine.ledger())
            await worker.drain(grace_s=60)
        assert await kept(bus, tenant="t", request=envelope.request)
        info = await bus.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
        assert not info["state"].get("subjects")

    with_bus(own_nats.url, test)
