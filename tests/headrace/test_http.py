"""Facts about serving: ports, several servers in a loop, and two ways to stop."""

import asyncio
import json

import httpx
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from headrace import connection
from headrace.http import CannotListen, Serving, serve
from tests.waiting import until


def app(text: str, gate: asyncio.Event | None = None) -> Starlette:
    async def answer(_: Request) -> PlainTextResponse:
        if gate is not None:
            await gate.wait()
        return PlainTextResponse(text)

    return Starlette(routes=[Route("/", answer)])


async def at(text: str, gate: asyncio.Event | None = None) -> Serving:
    return await serve(app(text, gate), host="127.0.0.1", port=0)


def test_two_servers_share_a_loop_and_know_their_ports() -> None:
    async def scenario() -> None:
        one, two = await at("one"), await at("two")
        async with httpx.AsyncClient() as client:
            assert (await client.get(one.url)).text == "one"
            assert (await client.get(two.url)).text == "two"
            assert (one.connections, two.connections) == (1, 1)
        await asyncio.gather(one.close(), two.close())

    uvloop.run(scenario())


def test_a_port_in_use_is_refused() -> None:
    async def scenario() -> None:
        serving = await at("first")
        with pytest.raises(CannotListen, match=str(serving.port)):
            await serve(app("second"), host="127.0.0.1", port=serving.port)
        await serving.close()

    uvloop.run(scenario())


def test_without_sockets_a_handshake_is_404_in_the_apis_shape() -> None:
    async def scenario() -> None:
        serving = await at("one")
        with pytest.raises(InvalidStatus) as caught:
            await connect(serving.url.replace("http", "ws", 1), proxy=None)
        await serving.close()
        assert caught.value.response.status_code == 404
        error = json.loads(caught.value.response.body or b"")["error"]
        assert (error["code"], error["message"]) == ("not_found", "No WebSocket is served at /.")

    uvloop.run(scenario())


def test_close_cuts_what_outlasts_the_grace() -> None:
    async def scenario() -> None:
        serving = await at("never", asyncio.Event())
        async with httpx.AsyncClient() as client:
            request = asyncio.create_task(client.get(serving.url))
            await until(lambda: serving.connections)
            async with asyncio.timeout(15):
                await serving.close(grace_s=0)
                with pytest.raises(httpx.HTTPError):
                    (await request).raise_for_status()

    uvloop.run(scenario())


async def told(serving: Serving, *parts: bytes) -> bytes:
    """Send parts of a request, and return what comes until the server closes."""
    reader, writer = await asyncio.open_connection(serving.host, serving.port)
    try:
        for part in parts:
            writer.write(part)
        async with asyncio.timeout(10):
            return await reader.read(-1)
    finally:
        writer.close()


@pytest.mark.parametrize("part", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\nX: "])
def test_a_head_that_is_not_whole_in_time_is_408_and_the_end(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        serving = await at("one")
        with monkeypatch.context() as hasty:
            hasty.setattr(connection, "HEAD_S", 1.0)
            answer = await told(serving, part)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b'"code":"request_timeout"' in answer
        async with httpx.AsyncClient() as client:
            assert (await client.get(serving.url)).text == "one"
        await serving.close()

    uvloop.run(scenario())


def test_a_body_that_is_not_whole_in_time_is_408_and_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "BODY_S", 0.1)

    async def scenario() -> None:
        serving = await at("one", asyncio.Event())
        answer = await told(serving, b"GET / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc")
        assert answer.startswith(b"HTTP/1.1 408 ")
        await serving.close()

    uvloop.run(scenario())


@pytest.mark.slow
def test_an_answer_may_take_longer_than_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 3.0)  # longer than a busy machine stands still
    monkeypatch.setattr(connection, "BODY_S", 3.0)

    async def scenario() -> None:
        gate = asyncio.Event()
        asyncio.get_running_loop().call_later(4.0, gate.set)
        serving = await at("late", gate)
        async with httpx.AsyncClient(timeout=30) as client:
            assert (await client.get(serving.url)).text == "late"
            assert (await client.post(serving.url, content=b"a")).status_code == 405
        await serving.close()

    uvloop.run(scenario())


@pytest.mark.parametrize(
    "head", [b"X: " + b"a" * 70_000 + b"\r\n", b"".join(b"X%d: a\r\n" % n for n in range(300))]
)
def test_a_head_that_is_too_large_is_431_and_the_end(head: bytes) -> None:
    async def scenario() -> None:
        serving = await at("one")
        answer = await told(serving, b"GET / HTTP/1.1\r\n", head, b"\r\n")
        assert answer.startswith(b"HTTP/1.1 431 ")
        await serving.close()

    uvloop.run(scenario())


PIPELINED = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2


def test_a_client_that_asked_again_before_the_end_of_its_stream_can_leave_it() -> None:
    """Only the request that it sent last, and that had not begun, was told that it is gone."""
    gone = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        watching = asyncio.create_task(watch())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.is_set():
            await send({"type": "http.response.body", "body": b"token", "more_body": True})
            await asyncio.sleep(0.01)
        watching.cancel()

    async def scenario() -> None:
        serving = await serve(stream, host="127.0.0.1", port=0)
        reader, writer = await asyncio.open_connection(serving.host, serving.port)
        writer.write(PIPELINED)
        await reader.readuntil(b"token")
        writer.transport.abort()
        try:
            await until(gone.is_set)
        finally:
            gone.set()
            await serving.close(grace_s=0)

    uvloop.run(scenario())


@pytest.mark.slow
def test_a_body_that_waits_behind_another_answer_is_not_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was not read before its turn, and cut the stream before it for coming late."""
    monkeypatch.setattr(connection, "BODY_S", 2.0)

    async def scenario() -> None:
        gate = asyncio.Event()
        asyncio.get_running_loop().call_later(3.0, gate.set)
        serving = await at("late", gate)
        reader, writer = await asyncio.open_connection(serving.host, serving.port)
        last = b"GET / HTTP/1.1\r\nConnection: close\r\nContent-Length: 3\r\n\r\n"
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + last)
        await gate.wait()
        writer.write(b"abc")
        async with asyncio.timeout(10):
            assert (await reader.read(-1)).count(b"HTTP/1.1 200 OK") == 2
        writer.close()
        await serving.close()

    uvloop.run(scenario())
