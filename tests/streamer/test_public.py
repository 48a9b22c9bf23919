"""Facts about a streamer that others than its own machine reach."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headrace import topology
from headrace.bus import BusSettings, connection
from streamer.__main__ import StreamerSettings
from tests.pipeline.asking import CHAT, chat
from tests.servers import NatsServer, free_port, node, wait_ready
from tests.waiting import wait_for


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_names_no_machine_needs_a_public_url(host: str) -> None:
    with pytest.raises(ValueError, match="--public-url"):
        StreamerSettings(host=host)
    assert StreamerSettings(host=host, public_url="/streams/a").public_url == "/streams/a"


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8000", "https://a.example/b/", "/streams/a", "/", "http://[::1]:1"]
)
def test_a_public_url_is_a_url_or_a_path(url: str) -> None:
    assert StreamerSettings(public_url=url).public_url == url


@pytest.mark.parametrize(
    "url",
    ["streams/a", "//evil.example", "a.example:80", "ftp://a", "/a?b", "/a b", "http://", "/a\n"],
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--public-url"):
        StreamerSettings(public_url=url)


@pytest.fixture
def split(own_nats: NatsServer, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A keyless ingress and a streamer on all addresses: the ingress's URL, the streamer's port."""

    async def apply() -> None:
        async with connection(BusSettings(own_nats.url), name="test", timeout_s=15) as bus:
            await topology.apply(bus)

    asyncio.run(apply())
    ports = [free_port() for _ in range(2)]
    nats = ("--nats-url", own_nats.url, "--grace-s", "1", "--port")
    open_ = ("--host", "0.0.0.0", "--public-url", "/streams/a")
    ingress = node("ingress", *nats, str(ports[0]), log=tmp_path / "ingress.log")
    streamer = node("streamer", *nats, str(ports[1]), *open_, log=tmp_path / "streamer.log")
    worker = node("workers", *nats[:-1], log=tmp_path / "worker.log")
    try:
        url = f"http://127.0.0.1:{ports[0]}"
        wait_ready(ingress, url)
        wait_for(
            lambda: "sim" in httpx.get(f"{url}/v1/models", timeout=60).text,
            within_s=15,
            what="the model",
        )

        def served() -> bool:
            assert streamer.alive, streamer.said()
            return httpx.post(url + CHAT, json=chat(), timeout=60).status_code == 303

        wait_for(served, within_s=15, what="the streamer")
        yield url, ports[1]
    finally:
        for process in (worker, streamer, ingress):
            process.terminate()
        for process in (worker, streamer, ingress):
            process.stop()


def test_without_keys_it_serves_no_websocket_and_redirects_lead_to_its_path(
    split: tuple[str, int],
) -> None:
    url, port = split
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://127.0.0.1:{port}{CHAT}", open_timeout=60)
    answer = httpx.post(url + CHAT, json=chat(max_tokens=2), timeout=60)
    assert answer.headers["location"].startswith("/streams/a/v1/replies/")
    ticket = answer.headers["location"].removeprefix("/streams/a")
    assert httpx.get(f"http://127.0.0.1:{port}{ticket}", timeout=60).status_code == 200
