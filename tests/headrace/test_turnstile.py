"""Facts about connections beyond what there may be: each is answered, and none is kept."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from headrace import turnstile as turnstiles
from headrace.crowd import Bounds
from headrace.http import Serving, WebSocketDoor, serve
from headrace.turnstile import Turnstile
from tests.waiting import until

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
ONE = 1
FEW = Bounds(connections_max=3)


def running(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(scenario())


async def _answer(request: Request) -> PlainTextResponse:
    await request.body()
    return PlainTextResponse("one")


async def _echo(_: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


@asynccontextmanager
async def served(bounds: Bounds) -> AsyncIterator[tuple[Serving, Turnstile]]:
    """Serve for a block; the connections of `client` are closed at its end."""
    turnstile = Turnstile(bounds)
    app = Starlette(routes=[Route("/", _answer, methods=["GET", "POST"])])
    serving = await serve(
        app, host="127.0.0.1", port=0, websocket=WebSocketDoor(_echo), turnstile=turnstile
    )
    try:
        yield serving, turnstile
    finally:
        for each in _opened:
            each.writer.close()
        for each in _opened:
            with contextlib.suppress(ConnectionError):
                await each.writer.wait_closed()
        _opened.clear()
        await serving.close()


def count_of(turnstile: Turnstile, name: str) -> Any:
    [reading] = [each for each in turnstile.readings() if each.name == name]
    return reading.read()


class Client:
    """A connection that is kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def get(self) -> bytes:
        self.writer.write(GET)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert await self.reader.readexactly(3) == b"one"
        return head

    async def to_the_end(self, sent: bytes = GET) -> bytes:
        self.writer.write(sent)
        async with asyncio.timeout(30):
            said = await self.reader.read(-1)
        self.writer.close()
        return said


_opened: list[Client] = []


async def client(serving: Serving) -> Client:
    _opened.append(Client(*await asyncio.open_connection(serving.host, serving.port)))
    return _opened[-1]


async def inside(serving: Serving, count: int) -> list[Client]:
    clients = [await client(serving) for _ in range(count)]
    for each in clients:
        assert (await each.get()).startswith(b"HTTP/1.1 200")
    return clients


def check(said: bytes, status: bytes, code: str) -> None:
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    lines = head.lower().split(b"\r\n")
    assert b"connection: close" in lines
    assert b"retry-after: 1" in lines
    assert b"content-length: %d" % len(body) in lines
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


@pytest.mark.parametrize("sent", [b"", GET, b"\0\1\2", b"POST / HTTP/1.1\r\n" + b"x" * 5_000_000])
def test_a_connection_too_many_is_503_whatever_it_sends(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sent:  # it is answered for what it sends, and not cut while it does
        monkeypatch.setattr(turnstiles, "LINGER_S", 60.0)

    async def scenario() -> None:
        async with served(FEW) as (serving, turnstile):
            clients = await inside(serving, 3)
            check(await (await client(serving)).to_the_end(sent), b"503 ", "connections_full")
            for each in clients:
                assert (await each.get()).startswith(b"HTTP/1.1 200")
            assert count_of(turnstile, "connections") == 3
            assert count_of(turnstile, "connections_refused") == {"all": 1, "address": 0}
            clients[0].writer.close()
            await until(lambda: turnstile.connections == 2)
            await inside(serving, 1)

    running(scenario)


def test_a_connection_too_many_of_an_address_is_429() -> None:
    async def scenario() -> None:
        async with served(Bounds(per_address_max=2)) as (serving, turnstile):
            clients = await inside(serving, 2)
            check(await (await client(serving)).to_the_end(), b"429 ", "too_many_connections")
            assert count_of(turnstile, "connections_refused") == {"all": 0, "address": 1}
            for each in clients:
                each.writer.close()
            await until(lambda: turnstile.connections == 0)
            await inside(serving, 2)

    running(scenario)


def test_websockets_are_connections_too() -> None:
    async def scenario() -> None:
        async with served(FEW) as (serving, turnstile):
            url = serving.url.replace("http", "ws", 1)
            sockets = [await connect(url, proxy=None) for _ in range(3)]
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, proxy=None)
            response = refused.value.response
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert json.loads(response.body or b"")["error"]["code"] == "connections_full"
            check(await (await client(serving)).to_the_end(), b"503 ", "connections_full")
            for each in sockets:
                await each.send("a")
                assert await each.recv() == "a"
            await sockets[0].close()
            await until(lambda: turnstile.connections == 2)
            await inside(serving, 1)
            for each in sockets:
                await each.close()

    running(scenario)


def test_a_client_that_was_turned_away_and_stays_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turnstiles, "LINGER_S", 0.1)

    async def scenario() -> None:
        async with served(Bounds(connections_max=ONE)) as (serving, turnstile):
            await inside(serving, 1)
            stays = await client(serving)
            check(await stays.reader.read(-1), b"503 ", "connections_full")

            async def sends() -> bool:
                try:
                    stays.writer.write(b"x" * 10_000)
                    await stays.writer.drain()
                except ConnectionError:
                    return True
                return False

            await until(sends)
            assert turnstile.connections == 1

    running(scenario)


def test_more_than_can_linger_are_answered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turnstiles, "LINGERING_MAX", 2)

    async def scenario() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        async with served(Bounds(connections_max=ONE)) as (serving, _):
            await inside(serving, 1)
            late = [await client(serving) for _ in range(20)]
            for each in late:
                check(await each.reader.read(-1), b"503 ", "connections_full")
                each.writer.close()
        assert faults == []

    running(scenario)


def _reset(serving: Serving, sent: bytes) -> None:
    """Connect, send, and go with a reset."""
    with socket.create_connection((serving.host, serving.port), timeout=30) as connection:
        with contextlib.suppress(ConnectionError):  # it was slow, and turned away meanwhile
            connection.sendall(sent)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("bounds", [FEW, Bounds(per_address_max=3), Bounds(per_address_max=1000)])
def test_however_connections_end_none_is_counted_for_ever(bounds: Bounds) -> None:
    handshake = (
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    ways = [b"", GET[:9], GET, GET * 3, b"\0" * 99, handshake, handshake + b"\xff" * 20]
    ways += [handshake.replace(b"13", b"12"), b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"]

    async def scenario() -> None:
        async with served(bounds) as (serving, turnstile):

            async def go(sent: bytes, closing: bool) -> None:
                if not closing:
                    await asyncio.to_thread(_reset, serving, sent)
                    return
                each = await client(serving)
                each.writer.write(sent)
                each.writer.close()

            for _ in range(5):
                rounds = [go(sent, closing) for sent in ways for closing in (True, False)]
                await asyncio.gather(*rounds)
            await until(lambda: turnstile.connections == 0)
            async with httpx.AsyncClient() as asking:
                assert (await asking.get(serving.url)).text == "one"

    running(scenario)
