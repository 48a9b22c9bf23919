"""Pings of a client that does not read: what it is owed stays small."""

import asyncio
import socket
from typing import Any

import uvloop

from headrace.connection import Connection, connection_of
from headrace.http import WebSocketDoor, serve

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
PINGS = 64 * 1024
PING, PONG, TEXT = 0x9, 0xA, 0x1


def frame(opcode: int, payload: bytes) -> bytes:
    """Return a client's frame, whose mask changes nothing."""
    return bytes([0x80 | opcode, 0x80 | len(payload)]) + bytes(4) + payload


def test_pongs_that_a_client_does_not_read_do_not_pile_up() -> None:
    """Each was kept until it is read: as much memory as a client, or nobody with a key, likes."""
    found: list[Connection | None] = []
    read = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        found.append(connection_of(scope))
        assert (await receive())["text"] == "all are sent"
        read.set()
        await receive()

    async def scenario() -> None:
        serving = await serve(app, host="127.0.0.1", port=0, websocket=WebSocketDoor(app))
        mine = socket.socket()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        mine.setblocking(False)
        await asyncio.get_running_loop().sock_connect(mine, (serving.host, serving.port))
        reader, writer = await asyncio.open_connection(sock=mine, limit=4096)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        try:
            for number in range(0, PINGS, 1024):
                many = (frame(PING, b"%0125d" % each) for each in range(number, number + 1024))
                writer.write(b"".join(many))
                await writer.drain()
            writer.write(frame(TEXT, b"all are sent"))
            await read.wait()
            [connection] = found
            assert connection is not None
            assert connection.unsent_bytes < 1024 * 1024
            last = bytes([0x80 | PONG, 125]) + b"%0125d" % (PINGS - 1)
            seen = b""
            while last not in seen:  # the latest of all is answered
                seen = seen[-len(last) :] + await reader.read(65536)
        finally:
            writer.transport.abort()
            await serving.close(grace_s=0)

    uvloop.run(scenario())
