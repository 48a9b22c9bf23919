"""What is below an ASGI application: bytes that a client has yet to take, or to send. Rule: who
does not read, or sends a byte at a time, keeps nothing of ours for ever.

ASGI tells an application nothing of its connection, and uvicorn closes one by letting it send what
is pending first: where the client does not read, that never ends. So scopes carry a `Connection`,
and what is left of an ended answer is cut when nothing of it moves for a while.
"""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from schemas.errors import Refusal, RequestTimeout

STALLED_S: Final = 60.0
"""How long what is left of an ended answer may stand still."""
HEAD_S: Final = 10.0
"""What a client may take to send a request's head; a new connection has no longer for its first."""
BODY_S: Final = 60.0
"""And for its body: 16 MiB at 2.3 Mbit/s."""
HEAD_BYTES_MAX: Final = 64 * 1024
HEADERS_MAX: Final = 200
_KEY: Final = "headrace.connection"


def _answer(refusal: Refusal) -> bytes:
    """Return an answer as it goes over the wire, after which the connection is closed."""
    content = msgspec.json.encode(refusal.body())
    head = (
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n"
        "content-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


_TOO_SLOW: Final = _answer(RequestTimeout("The request was not whole in time."))


class Connection:
    """A client's connection, as far as an application may look at it."""

    def __init__(self, transport: asyncio.Transport, take_all: Callable[[], None]) -> None:
        self.take_all = take_all
        """Have writes taken at once from now on, although the client does not read."""
        self._transport = transport
        self._cutting: asyncio.TimerHandle | None = None

    @property
    def unsent_bytes(self) -> int:
        """How much was written that the client's machine has yet to take."""
        return self._transport.get_write_buffer_size()

    def close(self, *, still_s: float) -> None:
        """Close once all is sent, or once nothing of it has moved for `still_s`."""
        left = self._transport.get_write_buffer_size()
        self._transport.close()
        self._watch(left, still_s)

    def watch_rest(self) -> None:
        """Cut the connection once nothing of what is unsent has moved for `STALLED_S`."""
        if left := self._transport.get_write_buffer_size():
            self._watch(left, STALLED_S)

    def _watch(self, left: int, still_s: float) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
        loop = asyncio.get_running_loop()
        self._cutting = loop.call_later(still_s, self._look, left, still_s)

    def _look(self, before: int, still_s: float) -> None:
        self._cutting = None
        left = self._transport.get_write_buffer_size()
        if left == before:  # more of it means that another answer was begun meanwhile
            self._transport.abort()
        elif left:
            self._watch(left, still_s)


def attach(scope: Any, connection: Connection) -> None:
    """Put a connection into the scope of what is asked on it."""
    scope.setdefault("extensions", {})[_KEY] = connection


def connection_of(scope: Mapping[str, Any]) -> Connection | None:
    """Return the connection of a scope; None where a server put none in."""
    found: Connection | None = scope.get("extensions", {}).get(_KEY)
    return found


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, whose scopes know their connection and whose ends are mended."""

    _cutting: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Take a new connection."""
        super().connection_made(transport)
        self._connection = Connection(transport, self.flow.resume_writing)
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._expect(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin a request's scope."""
        super().on_message_begin()
        attach(self.scope, self._connection)
        self._head_bytes = 0
        self._expect(HEAD_S)

    def on_url(self, url: bytes) -> None:
        """Take a part of a request's address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer a request, whose body may be on its way."""
        self._expect(BODY_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that a request is whole."""
        self._expect(None)
        super().on_message_complete()

    def _count(self, size: int) -> None:
        """Count a head's bytes. Raises ValueError, which is answered with 400 and the end."""
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX or len(self.headers) > HEADERS_MAX:
            raise ValueError("the head of the request is too large")

    def _expect(self, within_s: float | None) -> None:
        """Cut the connection unless its client has sent what it owes by then."""
        if self._cutting is not None:
            self._cutting.cancel()
        loop = asyncio.get_running_loop()
        self._cutting = None if within_s is None else loop.call_later(within_s, self._cut)

    def _cut(self) -> None:
        self._cutting = None
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(_TOO_SLOW)
        self.transport.close()

    def on_response_complete(self) -> None:
        """Note that an answer is written; the client may have yet to read it."""
        super().on_response_complete()
        self._connection.watch_rest()
