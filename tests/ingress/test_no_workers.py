"""What a wait ends in where no worker serves the model: 503 in place of 429 and 504."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from headrace import registry, topology
from headrace.bus import Bus
from headrace.topology import Sizes
from headrace.workforce import Workforce
from ingress.admit import Ingress, Origin, parse
from ingress.auth import Caller, Gate
from ingress.catalogue import Catalogue
from ingress.line import Line
from schemas import subjects
from schemas.errors import DeadlineExceeded, NoWorkers, QueueFull, Refusal
from schemas.model import ModelCard, WorkerEntry
from schemas.subjects import new_request_id
from tests.broker import with_bus
from tests.servers import NatsServer, freeze
from tests.waiting import until
from workers.sim.vocabulary import tokenizer_files

BODY = b'{"model": "m", "prompt": "Once", "max_tokens": 1}'


class Door:
    """An ingress in front of a queue, and a model that is known."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.workforce = Workforce(bus, clock=time.monotonic)
        self.catalogue = Catalogue(bus, clock=time.monotonic)
        self.threads = ThreadPoolExecutor(1)
        gate = Gate([])
        self.ingress = Ingress(
            bus,
            gate=gate,
            catalogue=self.catalogue,
            workforce=self.workforce,
            line=Line(bus, gate.directory, self.workforce),
            threads=self.threads,
        )

    async def open(self) -> None:
        card = ModelCard(name="m", created_s=1, max_model_len=100, files={}, partitions=2)
        await registry.publish_card(self.bus, card, tokenizer_files())
        await self.workforce.start()
        await self.catalogue.start()

    async def staff(self) -> None:
        entry = WorkerEntry(name="w", model="m", slots=1)
        await registry.announce(self.bus, subjects.WORKERS, "w", entry)
        await until(lambda: self.workforce.serves("m"))

    async def ask(self, *, timeout_s: float = 60) -> None:
        origin = Origin(Caller("t"), new_request_id(), "s", time.time() + timeout_s)
        await self.ingress.admit(origin, parse(BODY, chat=False), body_bytes=len(BODY))


@contextmanager
def frozen(server: NatsServer) -> Iterator[None]:
    """Stop the broker's process for a while: connected, and silent."""
    assert server._process is not None
    freeze(server._process.pid)
    try:
        yield
    finally:
        os.kill(server._process.pid, signal.SIGCONT)


@pytest.mark.parametrize(("staffed", "kind"), [(True, QueueFull), (False, NoWorkers)])
def test_a_full_queue_is_429_with_workers_and_503_without(
    own_nats: NatsServer, staffed: bool, kind: type[Refusal]
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus, Sizes(requests_max=1))
        door = Door(bus)
        await door.open()
        if staffed:
            await door.staff()
        await door.ask()  # waits: that there is no worker is no reason to refuse it
        with pytest.raises(kind) as refused:
            await door.ask()
        assert refused.value.retry_after_s

    with_bus(own_nats.url, test)


@pytest.mark.parametrize(("staffed", "kind"), [(True, DeadlineExceeded), (False, NoWorkers)])
def test_a_queue_that_is_silent_until_the_deadline_is_504_with_workers_and_503_without(
    own_nats: NatsServer, staffed: bool, kind: type[Refusal]
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        door = Door(bus)
        await door.open()
        if staffed:
            await door.staff()
        with frozen(own_nats):
            async with asyncio.timeout(20):  # and not ingress's own bound of 30 s
                with pytest.raises(kind):
                    await door.ask(timeout_s=0.5)

    with_bus(own_nats.url, test)


def test_a_deadline_that_has_passed_keeps_a_request_out_of_the_queue(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        door = Door(bus)
        await door.open()
        await door.staff()
        with pytest.raises(DeadlineExceeded):
            await door.ask(timeout_s=-0.1)
        assert (await bus.api("STREAM.INFO.REQUESTS"))["state"]["last_seq"] == 0

    with_bus(own_nats.url, test)
