"""The whole path as real processes, in both of its forms; every test runs in both.

`gateway`: nats-server, a gateway, two workers, and a worker of one slot. `split`: two ingress, two
streamers behind redirects, three workers, and the one of one slot. Each is started once for all
tests of this folder. Models: `sim` with two or three workers, `tiny` with one slot.
"""

import asyncio
import itertools
import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from headrace import topology
from headrace.bus import BusSettings, connection
from tests.servers import NatsServer, Process, free_port, node, wait_ready
from tests.waiting import wait_for

GAUGES = re.compile(r"_(inflight|waiting|running|open|reserved)$")
REST_S_MAX = 3.0
REDIRECT_S = 6.0
"""Who leaves between a redirect and its target is noticed 5 s after the request began."""

Mode = Literal["gateway", "split"]

SAME_CODE = "takes long, and the tiers apart change nothing about it"

GATEWAY_ONLY = {
    "test_gateway_and_one_worker_take_at_most_250_mb_at_rest": "the bound is a gateway's",
    "test_a_gateway_told_to_stop_ends_its_streams_and_refuses_new_ones": (
        "who refuses and who streams are two processes: test_redirects stops each"
    ),
    "test_a_gateway_past_its_grace_ends_streams_with_an_error_that_says_so": (
        "streams end at a streamer: test_redirects stops one past its grace"
    ),
    "test_a_client_that_does_not_read_keeps_no_gateway_past_its_kill": SAME_CODE,
    "test_what_comes_after_a_request_does_not_stand_in_its_answer": (
        "the answer of an ingress is a whole redirect"
    ),
    "test_100_streams_of_a_stopping_gateway_end_within_its_grace_or_go_on_at_another": (
        "test_rolling stops streamers too"
    ),
    "test_a_comment_comes_within_15_s_of_quiet_before_and_between_tokens": SAME_CODE,
    "test_a_prompt_of_5_mb_delays_nobodys_pong": SAME_CODE,
    "test_an_open_stream_takes_at_most_32_kib": SAME_CODE,
    "test_every_token_of_a_crowd_is_exact_and_an_open_stream_small": SAME_CODE,
    "test_one_slow_reader_takes_bounded_memory_and_nothing_from_the_others": SAME_CODE,
    "test_a_fast_request_in_a_crowd_waits_for_none_of_it": SAME_CODE,
}
"""Tests of what exists in a gateway only, and why; and some that take long."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _mode_of(item) == "split":
            item.add_marker(pytest.mark.slow)
    left_out = [item for item in items if _is_left_out(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _is_left_out(item: pytest.Item) -> bool:
    return _mode_of(item) == "split" and getattr(item, "originalname", "") in GATEWAY_ONLY


def _mode_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("mode")


@pytest.fixture(scope="session", params=["gateway", "split"])
def mode(request: pytest.FixtureRequest) -> Mode:
    """Which form of the system a test sees."""
    found: Mode = request.param
    return found


def page(url: str) -> str:
    """Return what a GET is answered with."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


@dataclass(frozen=True)
class Node:
    """A process of ours, its admin page, and where it serves clients if it does."""

    name: str
    process: Process
    admin_url: str
    url: str = ""

    def metrics(self) -> dict[str, float]:
        """Return the numbers of ours that /metrics shows."""
        text = page(f"{self.admin_url}/metrics")
        pairs = [line.split() for line in text.splitlines() if line.startswith("headrace_")]
        return {name: float(value) for name, value in pairs}

    def gauges(self) -> dict[str, float]:
        """Return the gauges of load."""
        return {name: value for name, value in self.metrics().items() if GAUGES.search(name)}


@dataclass(frozen=True)
class System:
    """Everything that runs."""

    mode: Mode
    nats_url: str
    doors: tuple[Node, ...]
    streamers: tuple[Node, ...]
    workers: tuple[Node, ...]
    tiny: Node
    _turns: Iterator[Node] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_turns", itertools.cycle(self.doors))

    @property
    def url(self) -> str:
        """Where requests are sent: the doors in turn."""
        return next(self._turns).url

    @property
    def socket_end(self) -> Node:
        """A process at which WebSockets end: a streamer where there are some."""
        return self.streamers[0] if self.streamers else self.doors[0]

    @property
    def front(self) -> tuple[Node, ...]:
        """Everything that clients speak to."""
        return (*self.doors, *self.streamers)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*self.front, *self.workers, self.tiny)

    @property
    def door(self) -> str:
        """The package whose process takes requests."""
        return "gateway" if self.mode == "gateway" else "ingress"

    @property
    def relay(self) -> str:
        """The package whose process relays replies."""
        return "gateway" if self.mode == "gateway" else "streamer"

    def client(self) -> httpx.Client:
        """Return an HTTP client that follows redirects and whose reads are bounded."""
        # Without TLS to check: reading the CA files takes longer than most of the tests.
        return httpx.Client(base_url=self.url, timeout=30, follow_redirects=True, verify=False)

    def async_client(self, *, timeout_s: float = 30) -> httpx.AsyncClient:
        """Return the same for many requests at once."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(
            base_url=self.url, timeout=timeout_s, limits=limits, follow_redirects=True, verify=False
        )

    def knows(self, model: str) -> bool:
        """Tell whether every door lists a model."""
        return all(model in models_at(door.url) for door in self.doors)

    def ledger(self, request: str) -> dict[str, int]:
        """Return what all engines together did for a request."""
        found = {"starts": 0, "aborts": 0, "tokens": 0}
        for worker in (*self.workers, self.tiny):
            entry = json.loads(page(f"{worker.admin_url}/sim/requests")).get(request, {})
            found = {name: count + entry.get(name, 0) for name, count in found.items()}
        return found

    def api(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream, as any NATS client could."""

        async def ask() -> dict[str, Any]:
            async with connection(BusSettings(self.nats_url), name="test", timeout_s=30) as bus:
                return await bus.api(verb, body)

        return asyncio.run(ask())

    def queued(self) -> int:
        """Return how many requests are in REQUESTS, counted by their subjects.

        nats-server's total alone can stay too high after a purge of single messages.
        """
        info = self.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
        return sum((info["state"].get("subjects") or {}).values())

    def unanswered(self) -> int:
        """Return how many requests are in REQUESTS, or wait at a door for their turn."""
        waiting = [door.gauges()[f"headrace_{self.door}_requests_waiting"] for door in self.doors]
        return self.queued() + int(sum(waiting))

    @property
    def leaves_within_s(self) -> float:
        """How long it takes until it is noticed that a client has left, at whatever moment."""
        return REST_S_MAX + (REDIRECT_S if self.mode == "split" else 0.0)

    def wait_at_rest(self, *, within_s: float = REST_S_MAX) -> None:
        """Wait until every gauge of load is 0 and the queue is empty."""

        def busy() -> dict[str, float]:
            gauges = {name: n for each in self.nodes for name, n in each.gauges().items() if n}
            return gauges | ({"REQUESTS": queued} if (queued := self.queued()) else {})

        wait_for(lambda: not busy(), within_s=within_s, what=lambda: f"rest, with {busy()}")


def _apply(nats_url: str) -> None:
    async def apply() -> None:
        async with connection(BusSettings(nats_url), name="test", timeout_s=30) as bus:
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


def front(
    module: str,
    nats_url: str,
    folder: Path,
    *args: str,
    name: str | None = None,
    env: dict[str, str] | None = None,
) -> Node:
    """Start a gateway, an ingress or a streamer on a free port."""
    port, admin_port = free_port(), free_port()
    name = name or module
    process = node(
        module,
        *("--nats-url", nats_url, "--name", name),
        *("--port", str(port), "--admin-port", str(admin_port), *args),
        log=folder / f"{name}.log",
        env=env,
    )
    return Node(name, process, f"http://127.0.0.1:{admin_port}", f"http://127.0.0.1:{port}")


@pytest.fixture(scope="session")
def system(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("pipeline")
    with ExitStack() as cleanup:
        nats = NatsServer(folder)
        cleanup.callback(nats.stop)
        nats.start()
        _apply(nats.url)

        def running(each: Node) -> Node:
            cleanup.callback(each.process.stop)
            return each

        def fronts(module: str, count: int) -> tuple[Node, ...]:
            names = [f"{module}-{number}" for number in range(1, count + 1)]
            return tuple(running(front(module, nats.url, folder, name=name)) for name in names)

        one = '{"max_num_seqs": 1}'
        count = 2 if mode == "gateway" else 3
        workers = [running(worker(f"worker-{n}", nats.url, folder)) for n in range(count)]
        size = ("--served-model-name", "tiny", "--engine-args", one)
        tiny = running(worker("tiny-0", nats.url, folder, *size))
        streamers = () if mode == "gateway" else fronts("streamer", 2)
        doors = fronts("gateway", 1) if mode == "gateway" else fronts("ingress", 2)
        found = System(mode, nats.url, doors, streamers, tuple(workers), tiny)
        for each in found.nodes:
            wait_ready(each.process, each.admin_url)
        wait_for(lambda: found.knows("sim") and found.knows("tiny"), within_s=15, what="models")
        for each in found.nodes:
            cleanup.callback(each.process.terminate)  # all at once, before waiting for any
        yield found
        for each in found.nodes:
            assert each.process.alive, f"{each.name} ended:\n{each.process.said()[-4000:]}"


def models_at(url: str) -> list[str]:
    return [model["id"] for model in json.loads(page(f"{url}/v1/models"))["data"]]
