"""A worker in the test's own process, around an engine of the test's choice."""

import asyncio
from contextlib import AsyncExitStack

from headrace import topology
from headrace.bus import BusSettings, connection
from workers.engine_sim import SimulatedEngine
from workers.lease import Leases
from workers.worker import Worker


async def running(stack: AsyncExitStack, url: str, name: str, engine: SimulatedEngine) -> Worker:
    """Run a worker until the stack is closed: then it is gone without a word, as one that dies."""
    settings = BusSettings(url)
    bus = await stack.enter_async_context(connection(settings, name=name, timeout_s=10))
    card = await engine.start()
    await topology.apply_model(bus, card.name, partitions=card.partitions)
    leases = Leases(settings, name=name)
    worker = Worker(bus, engine, card, leases, name=name)
    leases.start()
    stack.callback(leases.stop)
    await worker.start()
    for work in (worker.intake.pump, worker.beat_forever, worker.releases.say_forever):
        stack.callback(asyncio.create_task(work(), name=name).cancel)
    return worker
