"""The WebSockets of a process: which are served, how many, and their end when it stops."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from headrace.connection import Connection, connection_of
from headrace.handshake import Receive, Send, not_served, reject
from headrace.requests import peer_of
from streamer.admission import Admission
from streamer.mailbox import Mailbox

SOCKETS_MAX: Final = 20_000
AUTH_S: Final = 10.0


class Served(Protocol):
    """One client's socket."""

    async def serve(self, headers: Sequence[tuple[bytes, bytes]], peer: str | None) -> None:
        """Serve it to its end."""
        ...

    def close_if_idle(self) -> None:
        """Close it for good when nothing runs on it and this node stops."""
        ...


Room = Callable[["Sockets", Receive, Send, Connection | None], Served]


class Sockets:
    """The open WebSockets of this process; the ASGI application of all of them."""

    def __init__(
        self,
        mailbox: Mailbox,
        admission: Admission,
        *,
        rooms: Mapping[str, Room],
        sockets_max: int = SOCKETS_MAX,
        auth_s: float = AUTH_S,
    ) -> None:
        """`rooms` are the sockets that are served, by path."""
        self.mailbox = mailbox
        self.admission = admission
        self.auth_s = auth_s
        self.draining = False
        self._sockets_max = sockets_max
        self._rooms = rooms
        self._open: set[Served] = set()

    @property
    def open_count(self) -> int:
        """How many sockets are open."""
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether there are more sockets than there may be."""
        return len(self._open) > self._sockets_max

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one socket."""
        await receive()  # websocket.connect
        room = self._rooms.get(scope["path"])
        if room is None:
            await reject(send, not_served(scope["path"]))
            return
        socket = room(self, receive, send, connection_of(scope))
        self._open.add(socket)
        try:
            await socket.serve(scope["headers"], peer_of(scope))
        finally:
            self._open.discard(socket)

    def drain(self) -> None:
        """Take no further request; close each socket once its last one has ended."""
        self.draining = True
        for socket in self._open:
            socket.close_if_idle()
