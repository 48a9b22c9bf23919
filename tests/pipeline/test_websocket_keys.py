"""Keys over a WebSocket: by header or first message, never by the URL."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import Node, System
from tests.servers import free_port, node, wait_ready
from tests.talk import Talk, talking
from tests.waiting import until, wait_for

PING_S = 1.5
KEY = f"sk-{secrets.token_hex(16)}"


@pytest.fixture(scope="module")
def keyed(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A gateway with a key, which pings often; its `admin_url` is its clients' too.

    Who has not answered after three times that is cut: a busy machine's stalls are shorter.
    """
    folder = tmp_path_factory.mktemp("keyed-sockets")
    port = free_port()
    ports = (
        "--port",
        str(port),
        "--websocket-ping-s",
        f"{PING_S}",
        "--cors-origin",
        "https://a.example",
    )
    process = node(
        "gateway",
        *("--nats-url", system.nats_url, *ports),
        log=folder / "gateway.log",
        env={"HEADRACE_API_KEY": KEY},
    )
    found = Node("keyed", process, f"http://127.0.0.1:{port}")
    try:
        wait_ready(process, found.admin_url)
        wait_for(
            lambda: "sim" in httpx.get(f"{found.admin_url}/readyz", timeout=30).json()["models"],
            within_s=15,
            what="the model",
        )
        yield found
    finally:
        process.stop()


async def _asks(talk: Talk) -> None:
    assert (await talk.ask("a", chat(sim=hook("a")))).text() == "a"


def test_a_key_in_the_header_opens_the_socket(keyed: Node) -> None:
    async def run() -> None:
        headers = {"Authorization": f"Bearer {KEY}", "Origin": "https://anywhere.example"}
        async with talking(keyed.admin_url, CHAT, additional_headers=headers) as talk:
            await _asks(talk)

    asyncio.run(run())


def test_a_key_in_the_first_message_opens_the_socket(keyed: Node) -> None:
    async def run() -> None:
        async with talking(keyed.admin_url, CHAT) as talk:
            await talk.say({"type": "auth", "key": KEY})
            await _asks(talk)

    asyncio.run(run())


WRONG: list[Any] = [
    {"type": "auth", "key": "sk-wrong"},
    {"type": "auth", "key": KEY + "é"},
    {"type": "auth", "key": "x" * 100_000},
    {"type": "auth"},
    {"id": "a", "body": chat()},
    {"id": "a", "body": chat(), "key": KEY},
    "no JSON",
]


@pytest.mark.parametrize("first", WRONG, ids=range(len(WRONG)))
def test_another_first_message_closes_with_1008(keyed: Node, first: Any) -> None:
    async def run() -> None:
        async with talking(keyed.admin_url, CHAT) as talk:
            await talk.say(first)
            assert await talk.end() == 1008
            assert KEY[:12] not in (talk.closed[1] or "")

    asyncio.run(run())


@pytest.mark.parametrize(
    "header",
    ["Bearer x", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x"],
    ids=["short", "bare", "basic", "longer"],
)
def test_a_wrong_key_in_the_header_closes_with_1008(keyed: Node, header: str) -> None:
    async def run() -> None:
        async with talking(
            keyed.admin_url, CHAT, additional_headers={"Authorization": header}
        ) as talk:
            assert await talk.end() == 1008

    asyncio.run(run())


def test_a_key_in_the_url_is_not_looked_at_and_not_logged(keyed: Node) -> None:
    async def run() -> None:
        async with talking(keyed.admin_url, f"{CHAT}?key={KEY}&api_key={KEY}") as talk:
            await talk.say({"id": "a", "body": chat()})
            assert await talk.end() == 1008

    asyncio.run(run())
    assert KEY[3:9] not in keyed.process.said()


@pytest.mark.slow
def test_no_key_within_10_s_closes_with_1008(keyed: Node) -> None:
    async def run() -> None:
        begun_s = time.monotonic()
        async with talking(keyed.admin_url, CHAT) as talk:
            assert await talk.end() == 1008
        assert 9.5 < time.monotonic() - begun_s < 30

    asyncio.run(run())


@pytest.mark.slow
def test_pings_come_through_any_quiet(keyed: Node) -> None:
    async def run() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with talking(keyed.admin_url, CHAT, additional_headers=headers) as talk:
            pings = _count_pings(talk)
            heard = await talk.begin("a", chat(sim=hook("a", ttft_ms=600_000)))
            await until(lambda: len(pings) >= 3)  # the next is sent once one was answered
            await talk.cancel("a")
            await talk.ended(heard)
            assert not heard.chunks

    asyncio.run(run())


def _count_pings(talk: Talk) -> list[bytes]:
    """Have the payload of each ping noted."""
    pings: list[bytes] = []
    protocol = talk.socket.protocol
    send_pong = protocol.send_pong

    def noted(data: bytes) -> None:
        pings.append(data)
        send_pong(data)

    protocol.send_pong = noted  # type: ignore[method-assign]
    send_frame = protocol.send_frame

    def framed(frame: Any) -> None:
        if frame.opcode == 0xA:
            pings.append(frame.data)
        send_frame(frame)

    protocol.send_frame = framed  # type: ignore[method-assign]
    return pings


@pytest.mark.slow
def test_a_client_that_does_not_answer_pings_is_closed_and_its_request_aborted(
    system: System, keyed: Node
) -> None:
    async def run() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with talking(keyed.admin_url, CHAT, additional_headers=headers) as talk:
            heard = await talk.begin("a", chat(sim=hook("a", "b", ttft_ms=0, itl_ms=600_000)))
            await talk.chunks_came(heard, 1)
            talk.socket.transport.pause_reading()
            await until(lambda: asyncio.to_thread(lambda: not _open(keyed)))
            talk.socket.transport.resume_reading()
            assert await talk.end() == 1011

    asyncio.run(run())
    system.wait_at_rest()


def _open(keyed: Node) -> float:
    return keyed.metrics()["headrace_gateway_replies_open"]


# Pages of other origins, with keys


def test_a_configured_origin_may_read_the_answers(keyed: Node) -> None:
    headers = {"origin": "https://a.example", "authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=keyed.admin_url, headers=headers, timeout=30) as client:
        for answer in (client.post(CHAT, json=chat(max_tokens=1)), client.get("/v1/models")):
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_another_origin_is_served_but_no_page_may_read_it(keyed: Node) -> None:
    headers = {"origin": "https://b.example", "authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=keyed.admin_url, headers=headers, timeout=30) as client:
        answer = client.post(CHAT, json=chat(max_tokens=1))
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
