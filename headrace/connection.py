"""What is below an ASGI application: bytes that a client has yet to take. Rule: a client that does
not read keeps nothing of ours for ever.

ASGI tells an application nothing of its connection, and uvicorn closes one by letting it send what
is pending first: where the client does not read, that never ends. So scopes carry a `Connection`,
and what is left of an ended answer is cut when nothing of it moves for a while.

What is no HTTP is refused here, before any application hears of it: in the API's shape as well.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.answers import refused, written
from headrace.turnstile import Turnstile
from schemas.errors import (
    HeadersTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    Refusal,
    RequestTimeout,
)

STALLED_S: Final = 60.0
"""How long what is left of an ended answer may stand still."""
HEAD_S: Final = 10.0
"""What a client may take to send a request's head; a new connection has no longer for its first."""
BODY_S: Final = 60.0
"""And for its body: 16 MiB at 2.3 Mbit/s."""
HEAD_BYTES_MAX: Final = 64 * 1024
HEADERS_MAX: Final = 200
_KEY: Final = "headrace.connection"


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
    _running: RequestResponseCycle | None = None
    """The request that runs; `cycle` is the one that came last, which may wait behind it."""

    def __init__(self, *args: Any, turnstile: Turnstile, **more: Any) -> None:
        super().__init__(*args, **more)
        self._turnstile = turnstile

    def connection_made(self, transport: Any) -> None:
        """Take a new connection, if there may be one more."""
        if not self._turnstile.enter(transport):
            return
        super().connection_made(transport)
        self._connection = Connection(transport, self.flow.resume_writing)
        self._head_bytes = 0
        self._head_headers = 0
        self._unread_bytes = 0  # of a head that has not ended: the parser keeps all of it
        self._stays = False
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._turnstile.leave(self.transport)
        self._expect(None)
        self._end_running()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.more_body:
            self._expect(BODY_S)
        super()._start_asgi_task(cycle, app)

    def _end_running(self) -> None:
        """Tell the request that runs that its client is gone."""
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        self._unset_keepalive_if_required()
        self._unread_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(self._too_large() or InvalidRequest("The request is not valid HTTP/1.1."))
            return
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":  # an offer by itself: read again it is too
                self._refuse(MethodNotAllowed("This is no proxy: CONNECT is not allowed."))
            elif self._stays:
                self._go_on(data[upgrade.args[0] :])
            else:
                self.handle_websocket_upgrade()
            return
        # Only now: what came in one piece with a head may be its body.
        if (too_large := self._too_large(self._unread_bytes)) is not None:
            self._refuse(too_large)

    def _too_large(self, unread_bytes: int = 0) -> HeadersTooLarge | None:
        if max(self._head_bytes, unread_bytes) > HEAD_BYTES_MAX:
            return HeadersTooLarge(f"A request's head is at most {HEAD_BYTES_MAX} bytes.")
        if self._head_headers > HEADERS_MAX:
            return HeadersTooLarge(f"A request has at most {HEADERS_MAX} headers.")
        return None

    def on_message_begin(self) -> None:
        """Begin a request's scope."""
        super().on_message_begin()
        self._stays = False
        attach(self.scope, self._connection)
        self._head_bytes = self._head_headers = 0
        self._expect(HEAD_S)

    def on_url(self, url: bytes) -> None:
        """Take a part of a request's address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._head_headers += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        """Count a head's bytes. Raises ValueError, at which the parser stops."""
        self._head_bytes += size
        if self._too_large() is not None:
            raise ValueError("the head of the request is too large")

    def on_headers_complete(self) -> None:
        """Begin a request, unless it is read again: see `_go_on`."""
        self._unread_bytes = 0
        self._expect(BODY_S)
        self._stays = self.parser.should_upgrade() and not self._should_upgrade()
        if not self._stays:
            super().on_headers_complete()
        if self.pipeline:
            self._expect(None)  # nothing is read of it before its turn

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a request is whole."""
        self._unread_bytes = 0
        self._expect(None)
        if not self._stays:
            super().on_message_complete()

    def _expect(self, within_s: float | None) -> None:
        """Cut the connection unless its client has sent what it owes by then."""
        if self._cutting is not None:
            self._cutting.cancel()
        loop = asyncio.get_running_loop()
        self._cutting = None if within_s is None else loop.call_later(within_s, self._too_slow)

    def _too_slow(self) -> None:
        self._cutting = None
        self._refuse(RequestTimeout("The request was not whole in time."))

    def _should_upgrade(self) -> bool:
        """Tell whether this becomes a WebSocket: no other method does, nor a busy connection."""
        busy = self.cycle is not None and not self.cycle.response_complete
        return not busy and self.parser.get_method() == b"GET" and super()._should_upgrade()

    def _go_on(self, rest: bytes) -> None:
        """Read a request again without the protocol that it offers and that is not spoken here.

        curl and Java offer HTTP/2 so; the parser takes every such request for one without a body.
        """
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.scope["headers"]:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer what is no request, unless that would stand within another answer; then close."""
        self._end_running()
        cycle = self._running
        if not self.pipeline and (
            cycle is None or cycle.response_complete or not cycle.response_started
        ):
            self.transport.write(written(refused(refusal)))
        self.transport.close()

    def on_response_complete(self) -> None:
        """Note that an answer is written; the client may have yet to read it."""
        super().on_response_complete()
        self._connection.watch_rest()
