"""What is below an ASGI application: bytes that a client has yet to take. Rule: a client that does
not read keeps nothing of ours for ever.

ASGI tells an application nothing of its connection, and uvicorn closes one by letting it send what
is pending first: where the client does not read, that never ends. So scopes carry a `Connection`,
and what is left of an ended answer is cut when nothing of it moves for a while.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

STALLED_S: Final = 60.0
"""How long what is left of an ended answer may stand still."""
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

    def connection_made(self, transport: Any) -> None:
        """Take a new connection."""
        super().connection_made(transport)
        self._connection = Connection(transport, self.flow.resume_writing)

    def on_message_begin(self) -> None:
        """Begin a request's scope."""
        super().on_message_begin()
        attach(self.scope, self._connection)

    def on_response_complete(self) -> None:
        """Note that an answer is written; the client may have yet to read it."""
        super().on_response_complete()
        self._connection.watch_rest()
