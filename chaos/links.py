"""A process's connections to NATS, through us, so that they can be cut and held up.

Rule: a link forwards bytes and knows nothing of what they say. While it is mended it is a wire.
"""

import asyncio
from typing import Final, Literal, cast

HOST: Final = "127.0.0.1"
CONNECT_S: Final = 2.0

State = Literal["mended", "refusing", "holding", "swallowing"]


class Link:
    """Listens on a port of its own and forwards each connection to `port`."""

    def __init__(self, port: int) -> None:
        self.state: State = "mended"
        self._to_port = port
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()

    @property
    def url(self) -> str:
        """Where the process finds NATS."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return f"nats://{HOST}:{port}"

    async def open(self) -> None:
        """Begin to listen on a free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Pair(self).near, HOST, 0)

    async def close(self) -> None:
        """Cut everything and listen no more."""
        self._abort()
        if self._server is not None:
            self._server.close()

    def cut(self) -> None:
        """Break all connections; new ones are refused until `mend`."""
        self._set("refusing")
        self._abort()

    def hold(self) -> None:
        """Let nothing pass; `mend` lets all of it pass after all."""
        self._set("holding")

    def swallow(self) -> None:
        """Lose all that is sent; `mend` breaks the connections, since bytes are missing."""
        self._set("swallowing")

    def mend(self) -> None:
        """Be a wire again."""
        if self.state == "swallowing":
            self._abort()
        self._set("mended")

    def _set(self, state: State) -> None:
        self.state = state
        for pair in list(self._pairs):
            pair.follow(state)

    def _abort(self) -> None:
        for pair in list(self._pairs):
            pair.abort()

    def opened(self, pair: "_Pair") -> None:
        """Note a new connection, and connect it on the other side."""
        self._pairs.add(pair)
        pair.task = asyncio.create_task(self._connect(pair), name="link")

    def closed(self, pair: "_Pair") -> None:
        """Forget a connection."""
        self._pairs.discard(pair)

    async def _connect(self, pair: "_Pair") -> None:
        if self.state == "refusing":
            pair.abort()
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: pair.far, HOST, self._to_port)
        except (OSError, TimeoutError):
            pair.abort()
            return
        pair.follow(self.state)


class _Pair:
    """The two ends of one forwarded connection."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.near = _End(self)
        self.far = _End(self)
        self.near.other, self.far.other = self.far, self.near
        self.task: asyncio.Task[None] | None = None
        self.swallowing = False

    def follow(self, state: State) -> None:
        """Take on the link's state."""
        self.swallowing = state == "swallowing"
        for end in (self.near, self.far):
            end.hold(state == "holding")

    def abort(self) -> None:
        """Break both ends, without waiting for what is on its way."""
        self.link.closed(self)
        for end in (self.near, self.far):
            if end.transport is not None:
                end.transport.abort()


class _End(asyncio.Protocol):
    """One end: what it hears is written to the other one."""

    other: "_End"

    def __init__(self, pair: _Pair) -> None:
        self.transport: asyncio.Transport | None = None
        self._pair = pair
        self._early: list[bytes] = []
        self._held = False
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        if self is self._pair.near:
            self._pair.link.opened(self._pair)
            return
        if self.other.transport is None or self.other.transport.is_closing():
            self.transport.abort()
            return
        for data in self._early:
            self.transport.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._pair.swallowing:
            return
        transport = self.other.transport
        if transport is None:
            self.other._early.append(data)  # a client that speaks first: small
        else:
            transport.write(data)

    def hold(self, held: bool) -> None:
        """Read no more, or again."""
        self._held = held
        self._read_or_not()

    def pause_writing(self) -> None:
        self.other._full = True
        self.other._read_or_not()

    def resume_writing(self) -> None:
        self.other._full = False
        self.other._read_or_not()

    def _read_or_not(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._held or self._full:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pair.abort()
