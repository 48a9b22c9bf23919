"""A process that is told to stop lets what it has end, and takes no more."""

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from headrace.supervise import KILL_MARGIN_S
from schemas.wire import Released
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, Streamed, chat, collect, hook, refusal, stream
from tests.pipeline.conftest import System, models_at, worker
from tests.pipeline.resuming import Resuming
from tests.servers import Process, answers, free_port, node, wait_ready
from tests.waiting import wait_for
from workers.recovery import read_log

pytestmark = pytest.mark.slow

PIECES = [f"<{number}>" for number in range(60)]
LONG_MS = 250
"""Between two tokens: 15 seconds are time for whatever a test does while all streams are open."""
GRACE = ("--grace-s", "60")
"""More than those streams need, however busy the machine is."""


@contextmanager
def streaming(url: str, count: int, *, itl_ms: int = LONG_MS) -> Iterator[list[str]]:
    """Run so many streams in threads; their texts are there when the block ends."""
    texts = [""] * count

    def ask(number: int) -> None:
        with httpx.Client(base_url=url, timeout=60, follow_redirects=True, verify=False) as client:
            body = chat(f"stopping {number}", sim=hook(*PIECES, itl_ms=itl_ms, ttft_ms=0))
            found: Streamed = stream(client, body)
            texts[number] = found.text() + (found.events[-1].data)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    yield texts
    for thread in threads:
        thread.join()


def _stop_in_background(process: Process) -> tuple[threading.Thread, list[int]]:
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(process.stop(within_s=90)))
    thread.start()
    return thread, status


def test_a_worker_told_to_stop_ends_what_runs_and_pulls_no_more(
    system: System, tmp_path: Path
) -> None:
    third = worker("third", system.nats_url, tmp_path, *GRACE)
    try:
        wait_ready(third.process, third.admin_url)
        # Until its peers know of it, their pulls may be served in its place.
        numbers = itertools.count()

        def has_served() -> bool:
            with system.client() as client:
                collect(client, chat(f"warm {next(numbers)}", sim=hook("a")))
            return third.metrics()["headrace_worker_tokens_total"] > 0

        wait_for(has_served, within_s=15, what="its share")
        with streaming(system.url, 16) as texts:
            running = "headrace_worker_requests_running"
            wait_for(lambda: third.metrics()[running] >= 1, within_s=15, what="a request for it")
            stopper, status = _stop_in_background(third.process)
            wait_for(
                lambda: not answers(f"{third.admin_url}/readyz"), within_s=15, what="readiness 503"
            )
            assert answers(f"{third.admin_url}/healthz")
        stopper.join()
    finally:
        third.process.stop()
    assert texts == ["".join(PIECES) + "[DONE]"] * 16
    assert status == [0]
    assert "Traceback" not in third.process.said()
    system.wait_at_rest()


def test_a_worker_past_its_grace_gives_its_request_back_to_the_queue_and_ends(
    system: System, tmp_path: Path
) -> None:
    model = ("--served-model-name", "brief", "--grace-s", "0.3")
    only = worker("brief-0", system.nats_url, tmp_path, *model)
    try:
        wait_ready(only.process, only.admin_url)
        body = chat(model="brief", stream=True, sim=hook(*PIECES, itl_ms=2000, ttft_ms=0))
        with system.client() as client:
            wait_for(
                lambda: client.post(CHAT, json=chat(model="brief", max_tokens=1)).is_success,
                within_s=15,
                what="the model",
            )
            with client.stream("POST", CHAT, json=body) as answer:
                lines = answer.iter_lines()  # held, or the stream would be closed with it
                assert any(PIECES[0] in line for line in lines)
                assert only.process.stop(within_s=60) == 0  # half of what the stream would take
                log = f"replies.*.*.{answer.headers['x-request-id']}"
                frames = with_bus(system.nats_url, lambda bus: read_log(bus, log))
                assert isinstance(frames[-1][1], Released)
                assert system.queued() == 1
    finally:
        only.process.stop()
    assert "Traceback" not in only.process.said()
    system.wait_at_rest()


def test_a_gateway_told_to_stop_ends_its_streams_and_refuses_new_ones(
    system: System, tmp_path: Path
) -> None:
    port, admin_port = free_port(), free_port()
    url, admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
    ports = ("--port", str(port), "--admin-port", str(admin_port))
    args = ("--nats-url", system.nats_url, *ports, *GRACE)
    process = node("gateway", *args, log=tmp_path / "g.log")
    try:
        wait_ready(process, admin_url)
        with httpx.Client(base_url=url, timeout=30) as client:
            wait_for(
                lambda: len(client.get("/v1/models").json()["data"]) >= 2, within_s=10, what="sim"
            )
            with streaming(url, 10) as texts:
                begun = "headrace_gateway_replies_open 10.0"
                wait_for(
                    lambda: begun in client.get("/metrics").text, within_s=15, what="ten streams"
                )
                stopper, status = _stop_in_background(process)
                wait_for(lambda: not answers(f"{admin_url}/readyz"), within_s=15, what="503")
                assert answers(f"{admin_url}/healthz")
                answer = client.post(CHAT, json=chat())
                assert answer.status_code == 503
                assert refusal(answer)["code"] == "draining"
            stopper.join()
    finally:
        process.stop()
    assert texts == ["".join(PIECES) + "[DONE]"] * 10
    assert status == [0]
    assert "Traceback" not in process.said()


def test_a_gateway_past_its_grace_ends_streams_with_an_error_that_says_so(
    system: System, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    args = ("--nats-url", system.nats_url, "--port", str(port), "--grace-s", "0.3")
    process = node("gateway", *args, log=tmp_path / "g.log")
    try:
        wait_ready(process, url)
        with httpx.Client(base_url=url, timeout=20) as client:
            wait_for(
                lambda: len(client.get("/v1/models").json()["data"]) >= 2, within_s=10, what="sim"
            )
        # Each token may meet the end of the grace, so there are many.
        with streaming(url, 12) as texts:
            begun = "headrace_gateway_replies_open 12.0"
            with httpx.Client(base_url=url, timeout=30) as client:
                wait_for(lambda: begun in client.get("/metrics").text, within_s=15, what="streams")
            stopper, status = _stop_in_background(process)
        stopper.join()
    finally:
        process.stop()
    assert all('"code":"stream_interrupted"' in text for text in texts), texts
    assert status == [0]
    # They may be resumed, so they run on, to their end here.
    system.wait_at_rest(within_s=30)


def test_100_streams_of_a_stopping_gateway_end_within_its_grace_or_go_on_at_another(
    system: System, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    args = ("--nats-url", system.nats_url, "--port", str(port), "--grace-s", "2")
    process = node("gateway", *args, log=tmp_path / "g.log")
    short, long = PIECES[:20], [f"<{number}>" for number in range(320)]

    doors = [*[url] * 100, system.url]  # who is refused after all goes where the door stays

    async def run() -> Resuming:
        async with Resuming(doors, [system.url]) as client, asyncio.TaskGroup() as group:
            for number in range(100):
                pieces = short if number % 2 else long
                body = chat(f"one of 100: {number}", sim=hook(*pieces, itl_ms=75, ttft_ms=0))
                group.create_task(client.exact(body, pieces))
            await asyncio.to_thread(stop_once_all_have_begun)
        return client

    def stop_once_all_have_begun() -> None:
        begun = "headrace_gateway_replies_opened_total 100.0"
        wait_for(
            lambda: begun in httpx.get(f"{url}/metrics", timeout=30).text,
            within_s=60,
            what="100 streams",
        )
        process.terminate()

    try:
        wait_ready(process, url)
        wait_for(lambda: "sim" in models_at(url), within_s=10, what="sim")
        counts = asyncio.run(run()).counts
        assert (counts.whole, process.stop(within_s=60)) == (100, 0)
        assert counts.resumed >= 50
    finally:
        process.stop()
    assert "Traceback" not in process.said()
    system.wait_at_rest()


def test_a_client_that_does_not_read_keeps_no_gateway_past_its_kill(
    system: System, tmp_path: Path
) -> None:
    port = free_port()
    grace = ("--grace-s", "0.5")
    process = node(
        "gateway", *("--nats-url", system.nats_url, "--port", str(port), *grace), log=tmp_path / "g"
    )
    content = json.dumps(chat(stream=True, max_tokens=30_000, ignore_eos=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    try:
        wait_ready(process, f"http://127.0.0.1:{port}")
        wait_for(lambda: models_at(f"http://127.0.0.1:{port}"), within_s=15, what="models")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(head.encode() + content)
            assert client.recv(12) == b"HTTP/1.1 200"
            process.terminate()
            wait_for(lambda: not process.alive, within_s=0.5 + KILL_MARGIN_S, what="its end")
        assert process.stop() == 0
    finally:
        process.stop()
    assert "Traceback" not in process.said()
    system.wait_at_rest(within_s=6)
