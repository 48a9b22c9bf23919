"""A system of its own for tests that break its broker, and streams whose tokens are counted."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from headrace import topology
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.topology import Sizes
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import Mode, Node, front, models_at, page, worker
from tests.servers import answers, wait_ready
from tests.waiting import wait_for

BEGUN = 5
"""A stream of so many tokens has begun."""
TRIES = 3
"""A worker that stands still for 0.65 s while it is asked whether it has a request still is taken
over, so that no start is repeated is held to one of so many."""


class Broker(Protocol):
    """One nats-server or several."""

    @property
    def url(self) -> str: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Faulty:
    """A system whose broker may be broken."""

    nats_url: str
    folder: Path
    door: Node
    front: tuple[Node, ...]
    workers: tuple[Node, ...]

    def client(self, *, timeout_s: float = 30) -> httpx.Client:
        return httpx.Client(
            base_url=self.door.url, timeout=timeout_s, follow_redirects=True, verify=False
        )

    def async_client(self, *, timeout_s: float = 60) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.door.url,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None),
            follow_redirects=True,
            verify=False,
        )

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*self.front, *self.workers)

    def ready(self) -> bool:
        return all(answers(f"{node.admin_url}/readyz") for node in self.front)

    def all_ready(self) -> bool:
        return all(answers(f"{node.admin_url}/readyz") for node in self.nodes)

    def wait_ready(self) -> None:
        """Wait until every node has found its broker again."""
        wait_for(self.all_ready, within_s=15, what="readiness 200")

    def starts(self, request: str) -> int:
        """How often engines were started for a request."""
        return sum(
            json.loads(page(f"{each.admin_url}/sim/requests")).get(request, {}).get("starts", 0)
            for each in self.workers
        )

    def wait_at_rest(self, *, within_s: float = 10.0) -> None:
        """Wait until no node counts a request."""

        def rests() -> bool:
            return not any(n for each in self.nodes for n in each.gauges().values())

        wait_for(rests, within_s=within_s, what="every gauge at 0")

    def api(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream, as any NATS client could."""

        async def ask(bus: Bus) -> dict[str, Any]:
            return await bus.api(verb, body)

        return with_bus(self.nats_url, ask)

    def said(self) -> str:
        return "".join(each.process.said() for each in self.nodes)


@contextmanager
def running(
    broker: Broker, mode: Mode, folder: Path, *args: str, workers: int = 2, replicas: int = 1
) -> Iterator[Faulty]:
    """Run a system for the length of a block; at its end all of it lives and has said no trace."""
    broker.start()

    async def apply(bus: Bus) -> None:
        await topology.apply(bus, Sizes(replicas=replicas))

    def applied() -> bool:
        try:
            with_bus(broker.url, apply)
        except (BrokerAway, BrokerRefused):  # servers of a cluster may be electing
            return False
        return True

    nodes: list[Node] = []
    try:
        wait_for(applied, within_s=15, what="streams")
        modules = ["gateway"] if mode == "gateway" else ["streamer", "ingress"]
        fronts = tuple(front(module, broker.url, folder) for module in modules)
        nodes += fronts
        crew = tuple(worker(f"worker-{n}", broker.url, folder, *args) for n in range(workers))
        nodes += crew
        found = Faulty(broker.url, folder, fronts[-1], fronts, crew)
        for each in nodes:
            wait_ready(each.process, each.admin_url)
        if workers:
            wait_for(lambda: "sim" in models_at(found.door.url), within_s=15, what="sim")
        yield found
        for each in nodes:
            assert each.process.alive or each.process.told, each.process.said()[-4000:]
            assert "Traceback" not in each.process.said(), each.process.said()[-4000:]
    finally:
        for each in nodes:
            each.process.terminate()
        for each in nodes:
            each.process.stop()
        broker.stop()


@dataclass
class River:
    """A paced stream as its client saw it."""

    request: str
    seen: list[str]
    error: dict[str, Any] | None


async def river(
    client: httpx.AsyncClient,
    name: str,
    pieces: Sequence[str],
    *,
    itl_ms: float,
    begun: asyncio.Semaphore | None = None,
) -> River:
    """Ask for a stream and read all of it: `id=text` of each event, and the error that ends it.

    `begun` is told of the fifth token, or of the end of a stream that has none.
    """
    seen: list[str] = []
    try:
        return await _read(client, name, pieces, itl_ms, seen, begun)
    finally:
        if begun is not None and len(seen) < BEGUN:
            begun.release()


async def _read(
    client: httpx.AsyncClient,
    name: str,
    pieces: Sequence[str],
    itl_ms: float,
    seen: list[str],
    begun: asyncio.Semaphore | None,
) -> River:
    body = chat(name, stream=True, sim=hook(*pieces, itl_ms=itl_ms, ttft_ms=0))
    error = None
    async with client.stream("POST", CHAT, json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return River(answer.headers["x-request-id"], seen, answer.json()["error"])
        request = answer.headers["x-request-id"]
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                seen.append(line.removeprefix("id: "))
            elif line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    error = chunk["error"]
                    continue
                seen[-1] += "=" + (chunk["choices"][0]["delta"].get("content") or "")
                if len(seen) == BEGUN and begun is not None:
                    begun.release()
    return River(request, seen, error)


def whole(pieces: Sequence[str]) -> list[str]:
    """Return what a client sees of a stream that is whole: every token once, in order."""
    return [f"{seq}={piece}" for seq, piece in enumerate(pieces)] + [f"{len(pieces)}="]


def started_once(faulty: Faulty, rivers: Sequence[River], pieces: Sequence[str]) -> bool:
    """Check that streams are whole, and tell whether each was started once."""
    assert [each.error for each in rivers] == [None] * len(rivers)
    assert [each.seen for each in rivers] == [whole(pieces)] * len(rivers)
    faulty.wait_at_rest()
    return all(faulty.starts(each.request) == 1 for each in rivers)
