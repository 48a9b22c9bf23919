"""A worker that is cut off from the broker while it runs a request, and comes back too late."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from chaos.links import Link
from headrace import topology
from headrace.bus import Bus, BusSettings, connection
from schemas.subjects import RequestSubject
from schemas.wire import Envelope, SimHook, encode_envelope
from tests.queue import simulated
from tests.servers import NatsServer
from tests.waiting import until
from tests.workers.running import running
from workers.engine import Emit, Finish, Work
from workers.engine_sim import SimulatedEngine
from workers.recovery import past_of

pytestmark = pytest.mark.slow  # the lease must lapse

PIECES = tuple(f"{number} " for number in range(60))
ITL_MS = 200.0


def _envelope() -> Envelope:
    return simulated(SimHook(pieces=PIECES, itl_ms=ITL_MS, ttft_ms=0.0), max_tokens=len(PIECES))


class Held(SimulatedEngine):
    """An engine that begins nothing before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def generate(self, work: Work, emit: Emit) -> Finish:
        await self.go.wait()
        return await super().generate(work, emit)


async def _queued(bus: Bus) -> int:
    info = await bus.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
    return len(info["state"].get("subjects") or {})


@pytest.mark.parametrize("how", [Link.hold, Link.swallow])
def test_a_worker_that_was_cut_off_neither_acknowledges_what_another_runs_nor_counts_as_dead(
    own_nats: NatsServer, how: Callable[[Link], None]
) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(
                connection(BusSettings(own_nats.url), name="test", timeout_s=10)
            )
            await topology.apply(bus)
            link = Link(own_nats.port)
            await link.open()
            stack.push_async_callback(link.close)
            engine, held = SimulatedEngine(), Held()
            cut_off = await running(stack, link.url, "cut-off", engine)
            envelope = _envelope()
            subject = RequestSubject("online", "sim", 3, "t", envelope.request)
            await bus.store(str(subject), encode_envelope(envelope))

            async def begun() -> bool:
                return (await past_of(bus, envelope)).next_seq > 2

            await until(begun)
            how(link)

            def made() -> bool:
                return bool(engine.ledger()[envelope.request]["tokens"] == len(PIECES))

            await until(made, within_s=30)
            other = await running(stack, own_nats.url, "other", held)
            await until(lambda: other.recovered)
            link.mend()  # the other one has it, and begins only below
            await until(lambda: not cut_off.held)

            async def released() -> bool:
                return (await past_of(bus, envelope)).deaths == 1

            await until(released)  # the other's attempt has no end yet, and is the only one
            assert other.held == 1
            assert await _queued(bus) == 1
            held.go.set()
            await until(lambda: not other.held, within_s=60)

            async def acknowledged() -> bool:
                return await _queued(bus) == 0

            await until(acknowledged)
            history = await past_of(bus, envelope)
            assert history.ended
            assert "".join(piece.text for piece in history.pieces) == "".join(PIECES)

    asyncio.run(test())
