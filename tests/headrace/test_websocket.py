"""How sockets end when their server does."""

import asyncio
from typing import Any

import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from headrace.http import Serving, WebSocketDoor, serve
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
