"""Which models have a worker that takes requests, by the registry. Rule: who drains takes none.

A worker that dies without a word counts for two lifetimes of its entry, 8 s: absence is certain, a
presence may be stale.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from headrace import topology
from headrace.bus import Bus
from headrace.registry import Registry
from schemas import subjects
from schemas.errors import NoWorkers
from schemas.model import WorkerEntry

RETRY_AFTER_S: Final = 5
"""Nothing tells when a worker will come; a simulated one needs a second, a real one minutes."""


class Workforce:
    """The live workers; `start` it, and run `follow` as a task."""

    def __init__(self, bus: Bus, *, clock: Callable[[], float]) -> None:
        self._workers = Registry(
            bus, subjects.WORKERS, WorkerEntry, ttl_s=topology.ENTRY_TTL_S, clock=clock
        )

    async def start(self) -> None:
        """Find the live workers. Raises BrokerAway and BrokerRefused."""
        await self._workers.start()

    async def follow(self) -> None:
        """Forget the silent; for ever."""
        while True:
            await asyncio.sleep(topology.HEARTBEAT_S)
            self._workers.tick()

    def serves(self, model: str) -> bool:
        """Tell whether a worker takes requests for this model."""
        return any(
            worker.model == model and not worker.draining
            for worker in self._workers.entries.values()
        )

    def slots(self, model: str) -> int:
        """Return how many requests the model's workers run at once; 0 without any."""
        return sum(
            worker.slots
            for worker in self._workers.entries.values()
            if worker.model == model and not worker.draining
        )


def no_workers(model: str) -> NoWorkers:
    """Return what a wait for a worker ends in where there is none."""
    return NoWorkers(
        f"No worker that serves the model '{model}' is alive.", retry_after_s=RETRY_AFTER_S
    )
