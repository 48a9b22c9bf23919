"""A WebSocket client for tests: what came, by id, with the rules of the protocol checked."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

PATIENCE_S = 120.0
RESPONSES = "/v1/responses"


class Heard:
    """What came for one id: chunks, and then one end."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.times_s: list[float] = []
        self.error: dict[str, Any] | None = None
        self.done = False
        self.ended = asyncio.Event()

    def add(self, message: dict[str, Any]) -> None:
        """Take a message; the id is out of it."""
        assert not self.ended.is_set(), f"after the end: {message}"
        [(kind, value)] = message.items()
        self.times_s.append(time.monotonic())
        match kind:
            case "chunk":
                self.chunks.append(value)
                return
            case "done":
                assert value is True
                self.done = True
            case "error":
                assert set(value) - {"headers"} == {"message", "type", "param", "code"}
                self.error = value
            case _:
                raise AssertionError(f"a message that we never send: {message}")
        self.ended.set()

    def text(self) -> str:
        """The content of the first choice, of either endpoint."""
        parts = [part for chunk in self.chunks for part in chunk["choices"]]
        return "".join(p.get("text") or p.get("delta", {}).get("content") or "" for p in parts)


class Talk:
    """One socket, read all the time."""

    hears: ClassVar[type[Heard]] = Heard

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.nameless: list[dict[str, Any]] = []
        self._heard: dict[str, Heard] = defaultdict(self.hears)
        self._more = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for text in self.socket:
                assert isinstance(text, str)
                name, message = self._named(json.loads(text))
                if name is None:
                    self.nameless.append(message["error"])
                else:
                    self._heard[name].add(message)
                self._more.set()
        except ConnectionClosed:
            pass

    def _named(self, message: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """Return a message without the id that it is for, and the id."""
        return message.pop("id"), message

    async def say(self, message: Any) -> None:
        """Send a message; text is sent as it is."""
        await self.socket.send(message if isinstance(message, str) else json.dumps(message))

    def heard(self, name: str) -> Heard:
        """Return what has come for an id."""
        return self._heard[name]

    async def begin(self, name: str, body: Any) -> Heard:
        """Send a request under an id that is not in use."""
        self._heard[name] = self.hears()
        await self.say(self._begun(name, body))
        return self._heard[name]

    def _begun(self, name: str, body: Any) -> dict[str, Any]:
        """Return the message that begins a request."""
        return {"id": name, "body": body}

    async def ask(self, name: str, body: Any) -> Heard:
        """Send a request and wait for its end."""
        heard = await self.begin(name, body)
        await self.ended(heard)
        return heard

    async def ended(self, *all_heard: Heard) -> None:
        """Wait for the end of some requests."""
        async with asyncio.timeout(PATIENCE_S):
            for heard in all_heard:
                await self._until_ended(heard)

    async def _until_ended(self, heard: Heard) -> None:
        ended = asyncio.create_task(heard.ended.wait())
        await asyncio.wait([ended, self._reading], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not heard.ended.is_set():
            self._reading.result()
            raise AssertionError(f"the socket closed first: {self.closed}")

    async def cancel(self, name: str) -> None:
        """Have a request end."""
        await self.say({"id": name, "type": "cancel"})

    async def chunks_came(self, heard: Heard, count: int) -> None:
        """Wait for so many chunks."""
        async with asyncio.timeout(PATIENCE_S):
            while len(heard.chunks) < count:
                self._more.clear()
                await self._more.wait()

    async def nameless_error(self) -> dict[str, Any]:
        """Wait for an error that belongs to no request, and take it."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.nameless:
                self._more.clear()
                await self._more.wait()
        return self.nameless.pop(0)

    async def end(self) -> int:
        """Wait until the socket is closed by the other side, and return the code."""
        async with asyncio.timeout(PATIENCE_S):
            await self.socket.wait_closed()
            await self._reading
        assert self.socket.close_code is not None
        return self.socket.close_code

    @property
    def closed(self) -> tuple[int | None, str | None]:
        """The code and the reason of the end."""
        return self.socket.close_code, self.socket.close_reason


class HeardResponse(Heard):
    """The events that came for one response; `chunks` has all but an error."""

    def add(self, message: dict[str, Any]) -> None:
        """Take an event; the stream's id is out of it."""
        assert not self.ended.is_set(), f"after the end: {message}"
        self.times_s.append(time.monotonic())
        kind = message["type"]
        if kind == "error":
            assert set(message) == {"type", "status", "error"}
            self.error = message["error"]
        else:
            assert message["sequence_number"] == len(self.chunks)
            self.chunks.append(message)
            self.done = kind in ("response.completed", "response.incomplete")
        if self.error is not None or self.done or kind == "response.failed":
            self.ended.set()

    def text(self) -> str:
        """The text of the answer."""
        deltas = (each for each in self.chunks if each["type"] == "response.output_text.delta")
        return "".join(each["delta"] for each in deltas)


class ResponseTalk(Talk):
    """A socket of responses; a request's id is that of its stream."""

    hears = HeardResponse

    def _named(self, message: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        return message.pop("stream_id", None), message

    def _begun(self, name: str, body: Any) -> dict[str, Any]:
        return {"type": "response.create", "stream_id": name, **body}


@asynccontextmanager
async def talking(url: str, path: str, **more: Any) -> AsyncIterator[Talk]:
    """Open a socket for the length of a block; `url` begins with http."""
    options: dict[str, Any] = {"compression": None, "max_size": None, "proxy": None}
    # A client that has much to read hears a pong late: it does not ask for any.
    options |= {"open_timeout": 60, "ping_interval": None}
    socket = await connect(url.replace("http", "ws", 1) + path, **options | more)
    talk = ResponseTalk(socket) if path == RESPONSES else Talk(socket)
    try:
        yield talk
    finally:
        if socket.state is not State.CLOSED:  # closing it twice trips over asyncio's transport
            await socket.close()
    await talk._reading
