"""More connections than there may be, and than there are files for: those inside notice nothing."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
import pytest

from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import Node, System, front
from tests.servers import answers, wait_ready
from tests.sse import events_of
from tests.waiting import wait_for

BOUND = 6


@contextlib.contextmanager
def fronts(system: System, folder: Path, *flags: str) -> Iterator[list[Node]]:
    """Run a further process of each kind that clients speak to, for a block."""
    modules = [system.door, *(["streamer"] if system.streamers else [])]
    found = [front(each, system.nats_url, folder, *flags, name=f"more-{each}") for each in modules]
    try:
        for each in found:
            wait_ready(each.process, each.admin_url)
        yield found
        for each in found:
            assert each.process.alive, each.process.said()
    finally:
        for each in found:
            each.process.stop()


def tier(each: Node) -> str:
    return each.name.removeprefix("more-")


def counted(each: Node, name: str) -> int:
    return int(each.metrics()[f"headrace_{tier(each)}_{name}"])


def connected(each: Node) -> socket.socket:
    port = int(each.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=10)


@contextlib.contextmanager
def kept_open(each: Node) -> Iterator[HTTPConnection]:
    """Yield a connection on which something was asked: it may stay for longer than one that has
    said nothing yet."""
    host, _, port = each.url.removeprefix("http://").rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", "/v1/streams/x")
        assert connection.getresponse().read()
        yield connection
    finally:
        connection.close()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "status", "code", "label"),
    [
        ("--connections-max", 503, "connections_full", "all"),
        ("--connections-per-address-max", 429, "too_many_connections", "address"),
    ],
)
def test_beyond_its_bound_each_front_process_refuses_and_counts_it(
    system: System,
    tmp_path: Path,
    stack: contextlib.ExitStack,
    flag: str,
    status: int,
    code: str,
    label: str,
) -> None:
    with fronts(system, tmp_path, flag, str(BOUND)) as found:
        for each in found:
            inside = [stack.enter_context(kept_open(each)) for _ in range(BOUND)]
            wait_for(lambda e=each: counted(e, "connections") == BOUND, within_s=15, what="all")
            answer = httpx.post(each.url + CHAT, json=chat(), timeout=30)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
            assert httpx.get(f"{each.admin_url}/readyz", timeout=30).status_code == 200
            name = f'connections_refused_total{{bound="{label}"}}'
            assert counted(each, name) == 1
            for connection in inside:
                connection.close()
            wait_for(lambda e=each: counted(e, "connections") == 0, within_s=15, what="nobody")
            assert httpx.get(f"{each.url}/v1/streams/x", timeout=30).status_code == 404


@pytest.mark.slow
def test_without_a_file_left_streams_go_on_and_nothing_spins(
    system: System, tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    pieces = [f"<{k}>" for k in range(40)]
    with (
        fronts(system, tmp_path) as [door, *_],
        httpx.Client(base_url=door.url, timeout=30) as client,
    ):
        wait_for(lambda: "sim" in client.get("/readyz").text, within_s=10, what="the model")
        body = chat(stream=True, sim=hook(*pieces, itl_ms=100, ttft_ms=0))
        answer = client.send(client.build_request("POST", CHAT, json=body), stream=True)
        if answer.status_code == 303:  # what streams has files enough; what redirects has not
            answer = stack.enter_context(client.stream("GET", answer.headers["location"]))
        pid = door.process.pid
        files = len(os.listdir(f"/proc/{pid}/fd"))
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (files + 10, hard))
        crowd = [stack.enter_context(connected(door)) for _ in range(60)]
        before_s = _cpu_s(pid)
        raw = answer.read()
        used_s = _cpu_s(pid) - before_s
        texts = [event.json for event in events_of(raw)[:-1]]
        assert "".join(t["choices"][0]["delta"].get("content", "") for t in texts) == "".join(
            pieces
        )
        assert used_s < 1.5  # of about 4: a loop that spins uses all of them
        for connection in crowd:
            connection.close()
        answer.close()
        # Until it has seen them closed it has no file for whoever asks its admin port.
        metrics = f"{door.admin_url}/metrics"
        wait_for(
            lambda: answers(metrics) and counted(door, "connections") <= 1,
            within_s=10,
            what="a quiet door",
        )
        assert httpx.get(f"{door.url}/v1/models", timeout=30).status_code == 200
    assert "Traceback" not in door.process.said()


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@pytest.mark.slow
def test_a_bound_that_files_cannot_hold_is_warned_of_at_the_start(
    system: System, tmp_path: Path
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with fronts(system, tmp_path, "--connections-max", str(hard)) as found:
        for each in found:
            assert f"{hard} connections cannot be held" in each.process.said()
            limits = resource.prlimit(each.process.pid, resource.RLIMIT_NOFILE)
            assert limits == (hard, hard)
