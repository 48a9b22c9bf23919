"""How sockets end: when their server does, and before they are ones."""

import asyncio
import logging
from typing import Any

import pytest
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from headrace.handshake import reject
from headrace.http import Serving, WebSocketDoor, serve
from schemas.errors import NotFound
from tests.waiting import until


async def at(gate: asyncio.Event) -> Serving:
    """Serve sockets that end with 1001 once the gate is open, and with a last word."""

    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await gate.wait()
        await send({"type": "websocket.send", "text": "the last word"})
        await send({"type": "websocket.close", "code": 1001})

    return await serve(app, host="127.0.0.1", port=0, websocket=WebSocketDoor(app))


async def end_of(socket: ClientConnection) -> tuple[list[str | bytes], int | None]:
    """Return what still comes, and the close code."""
    heard = []
    try:
        while True:
            heard.append(await socket.recv())
    except ConnectionClosed as closed:
        return heard, closed.rcvd.code if closed.rcvd else None


async def refuses(serving: Serving) -> bool:
    """Tell whether the server has begun to stop."""
    try:
        _, writer = await asyncio.open_connection(serving.host, serving.port)
    except OSError:
        return True
    writer.close()
    return False


def test_the_application_has_the_last_word_and_names_the_code() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        serving = await at(gate)
        async with connect(serving.url.replace("http", "ws")) as socket:
            stopping = asyncio.create_task(serving.close(grace_s=60))
            await until(lambda: refuses(serving))
            gate.set()
            assert await end_of(socket) == (["the last word"], 1001)
            await stopping

    uvloop.run(scenario())


def test_a_socket_that_its_application_leaves_open_ends_in_1012() -> None:
    async def scenario() -> None:
        serving = await at(asyncio.Event())
        async with connect(serving.url.replace("http", "ws")) as socket:
            stopping = asyncio.create_task(serving.close(grace_s=0))
            assert await end_of(socket) == ([], 1012)
            await stopping

    uvloop.run(scenario())


def test_a_handshake_that_the_application_refuses_is_no_fault_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await reject(send, NotFound("Not here."))

    async def scenario() -> None:
        serving = await serve(app, host="127.0.0.1", port=0, websocket=WebSocketDoor(app))
        with pytest.raises(InvalidStatus) as caught:
            await connect(serving.url.replace("http", "ws"))
        await serving.close(grace_s=60)  # the application has returned
        assert caught.value.response.status_code == 404
        assert b"Not here." in caught.value.response.body

    caplog.set_level(logging.WARNING)
    uvloop.run(scenario())
    assert not caplog.records


def test_an_application_that_answers_no_handshake_is_one(caplog: pytest.LogCaptureFixture) -> None:
    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()

    async def scenario() -> None:
        serving = await serve(app, host="127.0.0.1", port=0, websocket=WebSocketDoor(app))
        with pytest.raises(InvalidStatus) as caught:
            await connect(serving.url.replace("http", "ws"))
        await serving.close(grace_s=60)
        assert caught.value.response.status_code == 500

    uvloop.run(scenario())
    assert "without completing handshake" in caplog.text
