"""What takes requests in, put together: the same in an ingress and in a gateway."""

import os
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from headrace.bus import Bus
from headrace.cors import Cors
from headrace.lifecycle import Tasks
from headrace.settings import LineSettings
from headrace.telemetry import Reading
from headrace.workforce import Workforce
from ingress import desk, telemetry
from ingress.admit import Ingress
from ingress.catalogue import Catalogue
from ingress.gate import Entrance
from ingress.line import line_of


class Reception:
    """The parts of a node that takes requests in; opened, started, run and drained together."""

    def __init__(
        self,
        settings: LineSettings,
        entrance: Entrance,
        bus: Bus,
        *,
        name: str,
        origins: Collection[str],
    ) -> None:
        """`name` is the node's; pages of `origins` may read what it answers."""
        gate = entrance.gate
        self._entrance = entrance
        self._bus = bus
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="prompt")
        self._catalogue = Catalogue(bus, clock=time.monotonic)
        self.workforce = Workforce(bus, clock=time.monotonic)
        self._line = line_of(settings, bus, gate.directory, self.workforce, node=name)
        self.cors = Cors(origins, keyless=gate.keyless)
        self.ingress = Ingress(
            bus,
            gate=gate,
            catalogue=self._catalogue,
            workforce=self.workforce,
            line=self._line,
            threads=self._threads,
            inspection=entrance.inspection,
        )
        self.desk = desk.Desk(self.ingress)

    async def open(self) -> None:
        """Read who may ask, before anybody does."""
        await self._entrance.open(self._bus, on_change=self._tenants_changed)

    def _tenants_changed(self) -> None:
        self.cors.keyless = self._entrance.gate.keyless

    async def start(self) -> None:
        """Learn of models and workers, and answer those who ask over NATS."""
        await self.workforce.start()
        await self._catalogue.start()
        await self._line.start()
        await desk.serve(self._bus, self.desk)

    def run(self, tasks: Tasks) -> None:
        """Start what goes on until the node stops."""
        self._entrance.start(tasks)
        tasks.start("models", self._catalogue.follow())
        tasks.start("workers", self.workforce.follow())
        tasks.start("line", self._line.release_forever())

    @property
    def models(self) -> list[str]:
        """The names of the models that are known."""
        return [card.name for card in self._catalogue.cards()]

    @property
    def limits(self) -> str:
        """Whether limits can be checked, and what becomes of requests where not."""
        return self._line.reservations.state

    def readings(self) -> list[Reading]:
        """Return what /metrics shows of it."""
        return telemetry.readings(self.ingress)

    def drain(self) -> None:
        """Take no further request in; who waits is sent elsewhere."""
        self.ingress.draining = True
        self._line.room.drain()

    async def close(self) -> None:
        """Write what ended requests have used, and let the threads end after what they do."""
        await self._line.stop()
        self._threads.shutdown(wait=False)
