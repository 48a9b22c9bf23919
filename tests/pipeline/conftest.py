"""The whole path as real processes: nats-server, a gateway, two workers, and a worker of one slot.

Started once for all tests of this folder. Models: `sim` with two workers, `tiny` with one slot.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import topology
from headrace.bus import BusSettings, connection
from tests.servers import NatsServer, Process, free_port, node, wait_for, wait_ready

GAUGES = re.compile(r"_(inflight|waiting|running|open|reserved)$")
REST_S_MAX = 3.0


@dataclass(frozen=True)
class Node:
    """A process of ours and its admin page."""

    name: str
    process: Process
    admin_url: str

    def metrics(self) -> dict[str, float]:
        """Return the numbers of ours that /metrics shows."""
        text = httpx.get(f"{self.admin_url}/metrics").text
        pairs = [line.split() for line in text.splitlines() if line.startswith("headrace_")]
        return {name: float(value) for name, value in pairs}

    def gauges(self) -> dict[str, float]:
        """Return the gauges of load."""
        return {name: value for name, value in self.metrics().items() if GAUGES.search(name)}


@dataclass(frozen=True)
class System:
    """Everything that runs."""

    url: str
    nats_url: str
    gateway: Node
    workers: tuple[Node, ...]
    tiny: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.gateway, *self.workers, self.tiny)

    def client(self) -> httpx.Client:
        """Return an HTTP client whose reads are bounded."""
        return httpx.Client(base_url=self.url, timeout=30)

    def ledger(self, request: str) -> dict[str, int]:
        """Return what all engines together did for a request."""
        found = {"starts": 0, "aborts": 0, "tokens": 0}
        for worker in (*self.workers, self.tiny):
            entry = httpx.get(f"{worker.admin_url}/sim/requests").json().get(request, {})
            found = {name: count + entry.get(name, 0) for name, count in found.items()}
        return found

    def api(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream, as any NATS client could."""

        async def ask() -> dict[str, Any]:
            async with connection(BusSettings(self.nats_url), name="test", timeout_s=5) as bus:
                return await bus.api(verb, body)

        return asyncio.run(ask())

    def queued(self) -> int:
        """Return how many requests are in REQUESTS."""
        return int(self.api("STREAM.INFO.REQUESTS")["state"]["messages"])

    def wait_at_rest(self, *, within_s: float = REST_S_MAX) -> None:
        """Wait until every gauge of load is 0 and the queue is empty."""

        def busy() -> dict[str, float]:
            gauges = {name: n for each in self.nodes for name, n in each.gauges().items() if n}
            return gauges | ({"REQUESTS": queued} if (queued := self.queued()) else {})

        give_up_s = time.monotonic() + within_s
        while left := busy():
            assert time.monotonic() < give_up_s, f"still busy after {within_s} s: {left}"
            time.sleep(0.05)


def _apply(nats_url: str) -> None:
    async def apply() -> None:
        async with connection(BusSettings(nats_url), name="test", timeout_s=5) as bus:
            await topology.apply(bus)

    asyncio.run(apply())


def worker(name: str, nats_url: str, folder: Path, *args: str) -> Node:
    port = free_port()
    process = node(
        "workers",
        *("--nats-url", nats_url, "--name", name, "--admin-port", str(port), *args),
        log=folder / f"{name}.log",
    )
    return Node(name, process, f"http://127.0.0.1:{port}")


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("pipeline")
    with ExitStack() as cleanup:
        nats = NatsServer(folder)
        cleanup.callback(nats.stop)
        nats.start()
        _apply(nats.url)

        def running(each: Node) -> Node:
            cleanup.callback(each.process.stop)
            return each

        one = '{"max_num_seqs": 1}'
        workers = [running(worker(f"worker-{n}", nats.url, folder)) for n in range(2)]
        size = ("--served-model-name", "tiny", "--engine-args", one)
        tiny = running(worker("tiny-0", nats.url, folder, *size))
        port, admin_port = free_port(), free_port()
        args = ("--nats-url", nats.url, "--port", str(port), "--admin-port", str(admin_port))
        process = node("gateway", *args, log=folder / "gateway.log")
        gateway = running(Node("gateway", process, f"http://127.0.0.1:{admin_port}"))
        for each in (*workers, tiny, gateway):
            wait_ready(each.process, each.admin_url)
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: models_at(url) == ["sim", "tiny"], within_s=15, what="both models")
        for each in (*workers, tiny, gateway):
            cleanup.callback(each.process.terminate)  # all at once, before waiting for any
        found = System(url, nats.url, gateway, tuple(workers), tiny)
        yield found
        for each in found.nodes:
            assert each.process.alive, f"{each.name} ended:\n{each.process.said()[-4000:]}"


def models_at(url: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
