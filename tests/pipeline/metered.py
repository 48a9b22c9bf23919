"""A system whose tenants have limits, in both forms, and how its tests ask and look."""

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from headrace.bus import Bus
from headrace.dismiss import dismiss
from schemas.subjects import requests_of
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import Mode, Node, _apply, front, page, worker
from tests.servers import NatsServer, answers
from tests.waiting import wait_for

SOON_S = 15.0
"""Within a second, and what a busy machine adds; what is lost comes minutes later, if ever."""


def key_of(tenant: str) -> str:
    """Return the key that a tenant shows."""
    return f"sk-{tenant}"


@dataclass(frozen=True)
class Metered:
    """Everything that runs: doors, streamers where they stand apart, a worker for each model."""

    nats_url: str
    doors: tuple[Node, ...]
    streamers: tuple[Node, ...]
    workers: Mapping[str, Node]

    @property
    def front(self) -> tuple[Node, ...]:
        return (*self.doors, *self.streamers)

    @property
    def socket_end(self) -> str:
        """Where WebSockets end."""
        return (self.streamers or self.doors)[0].url

    def client(self, tenant: str, door: int = 0) -> httpx.Client:
        """Return a tenant's client, which follows redirects."""
        return httpx.Client(
            base_url=self.doors[door].url,
            timeout=60,
            follow_redirects=True,
            headers={"authorization": f"Bearer {key_of(tenant)}"},
            verify=False,
        )

    def ask(self, tenant: str, door: int = 0, **more: Any) -> httpx.Response:
        """Ask for one token, or what `more` says."""
        with self.client(tenant, door) as client:
            return client.post(CHAT, json=chat(**({"max_tokens": 1} | more)))

    def at_once(self, tenant: str, count: int, **more: Any) -> list[httpx.Response]:
        """Send requests to all doors in turn at the same time; redirects are not followed."""

        async def run() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=None)
            headers = {"authorization": f"Bearer {key_of(tenant)}"}
            async with httpx.AsyncClient(
                timeout=60, limits=limits, headers=headers, verify=False
            ) as client:
                body = chat(**({"max_tokens": 1} | more))
                urls = [self.doors[n % len(self.doors)].url + CHAT for n in range(count)]
                return await asyncio.gather(*[client.post(url, json=body) for url in urls])

        return asyncio.run(run())

    def heads_at_once(self, tenant: str, count: int, **more: Any) -> list[httpx.Response]:
        """Ask for streams at all doors in turn at the same time, and hold all of them open until
        each has an answer's head: what has no end by itself is not over before the last one came.
        """

        async def run() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=None)
            headers = {"authorization": f"Bearer {key_of(tenant)}"}
            async with httpx.AsyncClient(
                timeout=60, limits=limits, headers=headers, verify=False, follow_redirects=True
            ) as client:
                body = chat(**({"max_tokens": 1, "stream": True} | more))

                async def head(door: Node) -> httpx.Response:
                    asked = client.build_request("POST", door.url + CHAT, json=body)
                    answer = await client.send(asked, stream=True)
                    if answer.status_code != 200:
                        await answer.aread()
                    return answer

                doors = [self.doors[n % len(self.doors)] for n in range(count)]
                answers = await asyncio.gather(*map(head, doors))
                for answer in answers:
                    await answer.aclose()
                return answers

        return asyncio.run(run())

    def left_of(self, tenant: str, door: int = 0) -> dict[str, str]:
        """Return the `x-ratelimit-*` headers of a GET, which has none while the broker is slow."""
        found: dict[str, str] = {}

        def is_told() -> bool:
            with self.client(tenant, door) as client:
                found.update(ratelimit(client.get("/v1/models")))
            return bool(found)

        wait_for(is_told, within_s=SOON_S, what="a tenant's standing")
        return found

    def used(self, tenant: str) -> int:
        """Return how many tokens a tenant has used, or has reserved."""
        left = self.left_of(tenant)
        return int(left["limit-tokens"]) - int(left["remaining-tokens"])

    def waiting(self) -> int:
        """Return how many requests wait in ingress, at doors that have not been told to stop."""
        return sum(self.waiting_at(door) for door in self.doors if not door.process.told)

    def waiting_at(self, door: Node) -> int:
        """Return how many requests wait in one."""
        tier = "ingress" if self.streamers else "gateway"
        return int(door.metrics()[f"headrace_{tier}_requests_waiting"])

    def queued(self) -> int:
        """Return how many requests are in REQUESTS, running ones too."""

        async def count(bus: Bus) -> int:
            info = await bus.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
            return sum((info["state"].get("subjects") or {}).values())

        return with_bus(self.nats_url, count)

    def ledger(self, request: str) -> dict[str, int]:
        """Return what all engines did for a request."""
        found = {"starts": 0, "aborts": 0, "tokens": 0}
        for each in self.workers.values():
            if each.process.alive:
                entry = json.loads(page(f"{each.admin_url}/sim/requests")).get(request, {})
                found = {name: count + entry.get(name, 0) for name, count in found.items()}
        return found

    def running(self, model: str) -> int:
        """Return how many requests an engine runs."""
        metrics = self.workers[model].metrics()
        return int(metrics["headrace_worker_requests_running"])

    @contextmanager
    def busy(self, model: str) -> Iterator[None]:
        """Fill a model's one slot for a block."""
        body = chat("long", model=model, stream=True, sim=LONG)
        with self.client("free") as client, client.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            wait_for(lambda: self.running(model) == 1, within_s=15, what="a full slot")
            yield
        wait_for(lambda: self.running(model) == 0, within_s=15, what="a free slot")

    @contextmanager
    def full(self, model: str) -> Iterator[int]:
        """Fill the slot and the queue of a model with one slot for a block, so that more requests
        wait in ingress, whichever they come to; yield how many do already."""
        body = chat("waits", model=model, stream=True)
        with self.busy(model):
            with ExitStack() as stack:
                doors = (*range(len(self.doors)),) * 3  # two fit, while nobody has counted
                for door in doors:
                    stack.callback(self.sent("free", body, door).close)

                def stands() -> bool:
                    """Tell whether no door lets one go, not even one that has yet to count."""
                    queued = self.queued()
                    full = queued > 1 and all(map(self.waiting_at, self.doors))
                    return full and self.waiting() + queued == 1 + len(doors)

                wait_for(stands, within_s=15, what="a full room")
                yield self.waiting()
            wait_for(lambda: self.waiting() == 0, within_s=15, what="an empty room")
            with_bus(self.nats_url, lambda bus: dismiss(bus, requests_of(tenant="free")))

    def sent(self, tenant: str, body: dict[str, Any], door: int = 0) -> socket.socket:
        """Send a request and wait for nothing; closing the socket is leaving."""
        parts = urlsplit(self.doors[door].url)
        assert parts.hostname is not None
        assert parts.port is not None
        content = json.dumps(body).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Authorization: Bearer {key_of(tenant)}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        connection = socket.create_connection((parts.hostname, parts.port), timeout=30)
        connection.sendall(head.encode() + content)
        return connection


async def exchange(url: str, tenant: str, body: dict[str, Any]) -> httpx.Response:
    """Ask as a client that costs little, for many at once; a cancelled one has left."""
    answer = await _exchange("POST", url + CHAT, tenant, json.dumps(body).encode())
    if answer.status_code == 303:
        answer = await _exchange("GET", answer.headers["location"], tenant, b"")
    return answer


async def _exchange(method: str, url: str, tenant: str, content: bytes) -> httpx.Response:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(
            f"{method} {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
            f"Authorization: Bearer {key_of(tenant)}\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        async with asyncio.timeout(120):
            head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    return httpx.Response(int(status.split()[1]), headers=headers, content=rest)


LONG = hook(*["a"] * 40, ttft_ms=60_000, itl_ms=60_000)
"""What no test waits for."""


def ratelimit(answer: httpx.Response) -> dict[str, str]:
    """Return an answer's `x-ratelimit-*` headers, without that prefix."""
    prefix = "x-ratelimit-"
    return {n.removeprefix(prefix): v for n, v in answer.headers.items() if n.startswith(prefix)}


@contextmanager
def metered(
    mode: Mode,
    folder: Path,
    *,
    tenants: Mapping[str, str],
    models: Mapping[str, str],
    doors: int = 1,
    every: tuple[str, ...] = (),
    last: tuple[str, ...] = (),
    more: str = "",
) -> Iterator[Metered]:
    """Run a system for a block: `tenants` by name with their lines of headrace.toml, `models` by
    their workers' names with their engine arguments. Split, it has three ingress. `every` are flags
    of all doors, `last` the last one's own, `more` is the rest of headrace.toml, which the workers
    read too."""
    config = folder / "limits.toml"
    tables = []
    for name, terms in tenants.items():
        digest = hashlib.sha256(key_of(name).encode()).hexdigest()
        tables.append(f'[[tenants]]\nname = "{name}"\n{terms}')
        tables.append(f'[[keys]]\ntenant = "{name}"\nsha256 = "{digest}"')
    config.write_text("\n".join([*tables, more]))
    known = ("--config", str(config))
    # Who does not follow a redirect stands in the queue for as long as a test takes.
    unread = ("--orphan-s", "600")
    with ExitStack() as cleanup:
        nats = NatsServer(folder)
        cleanup.callback(nats.stop)
        nats.start()
        _apply(nats.url)

        def running(each: Node) -> Node:
            cleanup.callback(each.process.stop)
            return each

        def fronts(module: str, count: int, *args: str) -> tuple[Node, ...]:
            names = [f"{module}-{number}" for number in range(1, count + 1)]
            return tuple(running(front(module, nats.url, folder, *args, name=n)) for n in names)

        def engine(name: str, arguments: str) -> Node:
            flags = (*known, *unread, *_served(name), "--engine-args", arguments)
            return running(worker(name, nats.url, folder, *flags))

        engines = {name: engine(name, arguments) for name, arguments in models.items()}
        streamers = fronts("streamer", 1) if mode == "split" else ()
        module, count = ("ingress", 3) if mode == "split" else ("gateway", doors)
        last_door = front(module, nats.url, folder, *known, *every, *last, name=f"{module}-last")
        gates = (*fronts(module, count - 1, *known, *every), running(last_door))
        found = Metered(nats.url, gates, streamers, engines)
        for each in (*engines.values(), *found.front):
            url = each.admin_url
            wait_for(lambda url=url: answers(f"{url}/readyz"), within_s=60, what=each.name)
        for door in gates:
            readyz = f"{door.admin_url}/readyz"
            wait_for(
                lambda url=readyz: all(_served(name)[1] in page(url) for name in models),
                within_s=20,
                what="the models",
            )
        yield found
        for each in found.front:
            cleanup.callback(each.process.terminate)
            assert each.process.alive or each.process.told, (
                f"{each.name} ended:\n{each.process.said()[-4000:]}"
            )


def _served(name: str) -> tuple[str, str]:
    """Return what names a worker's model: `twin-1` and `twin-2` both serve `twin`."""
    return "--served-model-name", name.partition("-")[0]


def prompt_tokens(house: Metered, content: str, *, model: str = "sim") -> int:
    """Return how long a prompt is."""
    answer = house.ask("free", model=model, messages=chat(content)["messages"])
    found: int = answer.json()["usage"]["prompt_tokens"]
    return found


def until_used(house: Metered, tenant: str, tokens: int) -> int:
    """Wait until a tenant is charged no more than this, and return what it is charged."""
    wait_for(
        lambda: house.used(tenant) <= tokens,
        within_s=SOON_S,
        what=f"{tokens} tokens to be charged, not {house.used(tenant)}",
    )
    return house.used(tenant)


@dataclass(frozen=True)
class Drained:
    """A bucket's drain since a moment."""

    per_minute: int
    since_s: float

    @property
    def tokens(self) -> float:
        """How many tokens drained until now, and one for rounding."""
        return (time.monotonic() - self.since_s) * self.per_minute / 60 + 1
