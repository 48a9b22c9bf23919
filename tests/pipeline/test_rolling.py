"""A rolling restart of every process, one by one and under load, loses nothing.

Two gateways (or two ingress and two streamers), three workers and a nats-server are told to stop
and started again in turn, while clients ask for streams all the time. A client asks again where it
is refused, and resumes where it is interrupted; every stream must be exact, token by token.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from headrace import topology
from headrace.bus import Bus
from tests.broker import with_bus
from tests.pipeline.asking import chat, hook
from tests.pipeline.conftest import GAUGES, models_at
from tests.pipeline.resuming import Resuming
from tests.servers import NatsServer, Process, answers, free_port, node, wait_ready
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

SHORT, LONG = 16, 6
SHORT_PIECES = [f"<{number}>" for number in range(40)]
LONG_PIECES = [f"<{number}>" for number in range(500)]
ORPHAN_S = 10.0
"""Longer than a client needs to come back, whatever else the machine does."""
PATIENCE_S = 180.0
"""How long a client tries in vain before the test fails."""


@dataclass
class Part:
    """A process of ours that is stopped and started again on the same ports."""

    module: str
    name: str
    folder: Path
    args: tuple[str, ...]
    admin: int = field(default_factory=free_port)
    process: Process = field(init=False)

    def start(self) -> None:
        args = ("--name", self.name, "--admin-port", str(self.admin), *self.args)
        self.process = node(self.module, *args, log=self.folder / f"{self.name}.log")

    def wait_ready(self) -> None:
        wait_ready(self.process, f"http://127.0.0.1:{self.admin}")

    def restart(self) -> None:
        """Stop it, check what it says of itself meanwhile, and start it again."""
        self.process.terminate()
        url = f"http://127.0.0.1:{self.admin}"
        wait_for(lambda: not answers(f"{url}/readyz"), within_s=15, what="readiness 503")
        status = self.process.stop()
        assert status == 0, self.process.said()[-4000:]
        self.start()
        self.wait_ready()

    def busy(self) -> dict[str, float]:
        """Return the gauges of load that are not 0."""
        text = httpx.get(f"http://127.0.0.1:{self.admin}/metrics", timeout=30).text
        pairs = [line.split() for line in text.splitlines() if line.startswith("headrace_")]
        return {k: float(n) for k, n in pairs if GAUGES.search(k) and float(n)}


async def ask_while(clients: Resuming, during: Callable[[], None]) -> None:
    """Have many clients ask again and again for the time that `during` takes in a thread."""
    ended = False

    async def ask_on(name: str, pieces: list[str]) -> None:
        for number in itertools.count():
            if ended:
                return
            body = chat(f"{name} {number}", sim=hook(*pieces, itl_ms=20, ttft_ms=0))
            async with asyncio.timeout(PATIENCE_S):
                await clients.exact(body, pieces)

    async with clients, asyncio.TaskGroup() as group:
        for number in range(SHORT):
            group.create_task(ask_on(f"short {number}", SHORT_PIECES))
        for number in range(LONG):
            group.create_task(ask_on(f"long {number}", LONG_PIECES))
        try:
            await asyncio.to_thread(during)
        finally:
            ended = True


@dataclass
class Rolled:
    """The whole system: its broker, its processes, and where clients go."""

    nats: NatsServer
    parts: list[Part]
    doors: list[str]
    streamers: list[str]

    def queued(self) -> int:
        """Return how many requests are in the queue."""

        async def count(bus: Bus) -> int:
            info = await bus.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
            return sum((info["state"].get("subjects") or {}).values())

        return with_bus(self.nats.url, count)


@pytest.fixture(params=["gateway", "split"])
def rolled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rolled]:
    with ExitStack() as cleanup:
        nats = NatsServer(tmp_path)
        cleanup.callback(nats.stop)
        nats.start()
        with_bus(nats.url, topology.apply)
        common = ("--nats-url", nats.url, "--grace-s", "2")

        def fronts(module: str) -> tuple[list[Part], list[str]]:
            ports = [free_port() for _ in range(2)]
            parts = [
                Part(module, f"{module}-{n}", tmp_path, (*common, "--port", str(port)))
                for n, port in enumerate(ports)
            ]
            return parts, [f"http://127.0.0.1:{port}" for port in ports]

        doors, door_urls = fronts("gateway" if request.param == "gateway" else "ingress")
        streamers, streamer_urls = (
            ([], door_urls) if request.param == "gateway" else fronts("streamer")
        )
        patience = ("--orphan-s", str(ORPHAN_S))
        workers = [Part("workers", f"worker-{n}", tmp_path, (*common, *patience)) for n in range(3)]
        parts = [*doors, *streamers, *workers]
        for part in parts:
            part.start()
            cleanup.callback(lambda part=part: part.process.kill())
        for part in parts:
            part.wait_ready()
        for url in door_urls:
            wait_for(lambda url=url: models_at(url) == ["sim"], within_s=15, what="the model")
        yield Rolled(nats, parts, door_urls, streamer_urls)


def test_a_rolling_restart_of_every_process_under_load_loses_nothing(rolled: Rolled) -> None:
    clients = Resuming(rolled.doors, rolled.streamers)

    def began(count: int) -> None:
        """Wait until so many more streams were whole: the load is back."""
        wanted = clients.counts.whole + count
        wait_for(lambda: clients.counts.whole >= wanted, within_s=90, what="streams that end")

    def roll() -> None:
        for part in rolled.parts:
            began(10)
            part.restart()
        began(10)
        rolled.nats.stop()
        rolled.nats.start()
        began(SHORT + LONG)

    asyncio.run(ask_while(clients, roll))
    assert clients.counts.resumed > 0
    # What a client asked for again had perhaps been queued the first time.
    wait_for(
        lambda: not rolled.queued() and not any(part.busy() for part in rolled.parts),
        within_s=30,
        what="rest",
    )
    for part in rolled.parts:
        assert "Traceback" not in part.process.said(), part.process.said()[-4000:]
