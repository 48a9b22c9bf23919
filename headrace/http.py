"""The one door to uvicorn: ASGI apps on sockets of ours, several in one event loop."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.connection import HttpProtocol
from headrace.handshake import serve_none
from headrace.sockets import CannotListen, http_url, listen
from headrace.turnstile import Turnstile
from headrace.websocket import WebSocketProtocol

__all__ = ["CannotListen", "Serving", "WebSocketDoor", "listen", "serve"]

KEEP_ALIVE_S: Final = 75
"""Longer than the 60 s after which common proxies and SDKs drop an idle connection: the side
that closes first should not be the one that a request is on its way to."""
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
PONG_PINGS: Final = 3
"""For how many pings' time a pong may be missing: behind a slow reader's unread tokens it is late,
and 3 × 20 s is what a stream may stall for as well."""


@dataclass(frozen=True)
class WebSocketDoor:
    """The ASGI application of WebSockets, and the seconds between pings."""

    app: ASGIApp
    ping_s: float = 20.0


NO_SOCKETS: Final = WebSocketDoor(serve_none)


class _ByProtocol:
    """Two applications on one port. No framework stands between a token and its socket."""

    def __init__(self, http: ASGIApp, websocket: ASGIApp) -> None:
        self._http = http
        self._websocket = websocket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._websocket if scope["type"] == "websocket" else self._http
        await app(scope, receive, send)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with an event for "it serves"."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()


class Serving:
    """An app that is being served. Made by `serve`."""

    def __init__(self, server: _Server, listener: socket.socket) -> None:
        self._server = server
        address = listener.getsockname()
        self.host: str = address[0]
        self.port: int = address[1]
        self._task = asyncio.create_task(
            server.serve(sockets=[listener]), name=f"http on port {self.port}"
        )

    @property
    def url(self) -> str:
        """Where the app is served, without a path."""
        return http_url(self.host, self.port)

    @property
    def connections(self) -> int:
        """How many client connections are open."""
        return len(self._server.server_state.connections)

    async def wait(self) -> None:
        """Last as long as the server; raise what it raises."""
        await asyncio.shield(self._task)

    async def close(self, *, grace_s: float = 1.0) -> None:
        """Stop accepting, let running requests end for at most `grace_s`, then cut them."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        await self._task


async def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    websocket: WebSocketDoor = NO_SOCKETS,
    turnstile: Turnstile | None = None,
) -> Serving:
    """Serve an app and return once it accepts connections. Raises CannotListen.

    The app is given HTTP alone. Without `websocket` every handshake is refused with 404.
    `turnstile` says how many connections there may be.
    """
    listener = listen(host, port)
    turnstile = turnstile or Turnstile()
    config = uvicorn.Config(
        _ByProtocol(app, websocket.app),
        http=partial(HttpProtocol, turnstile=turnstile),  # type: ignore[arg-type]
        ws=partial(WebSocketProtocol, turnstile=turnstile),  # type: ignore[arg-type]
        ws_max_size=MESSAGE_BYTES_MAX,
        ws_ping_interval=websocket.ping_s,
        ws_ping_timeout=PONG_PINGS * websocket.ping_s,
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config)
    serving = Serving(server, listener)
    ready = asyncio.create_task(server.serving.wait())
    await asyncio.wait([ready, serving._task], return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        ready.cancel()
        serving._task.result()  # raises why it ended
    return serving
