"""Many streams on one WebSocket. Rule: an error of one request never closes the socket.

A client sends `{"id", "body"}`, `{"id", "type": "cancel"}`, or first `{"type": "auth", "key"}`.
Each message to it carries the `id` with one of `chunk`, `error` or `done`, and exactly one of the
last two ends a request. Close codes are RFC 6455's: 1001 when this node stops, 1003 for binary,
1008 for a missing or wrong key, 1013 when there are too many sockets; the protocol below us adds
1007 and 1009.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from schemas.errors import (
    Draining,
    Forbidden,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    Refusal,
    RequestCancelled,
    StreamInterrupted,
    TooManyRequests,
    refusal_of,
)
from schemas.subjects import new_request_id
from streamer.admission import Admission
from streamer.buffer import OpenReply
from streamer.chunks import Chunks
from streamer.mailbox import Mailbox
from streamer.reply import Broken, Complete, Event, Shown

log = logging.getLogger(__name__)

REQUESTS_MAX: Final = 256
SOCKETS_MAX: Final = 20_000
BUFFER_BYTES_MAX: Final = 16 * 1024
AUTH_S: Final = 10.0
DEADLINE_S: Final = 600.0
ID_CHARACTERS_MAX: Final = 256
GOING_AWAY: Final = 1001
UNSUPPORTED: Final = 1003
POLICY: Final = 1008
TRY_LATER: Final = 1013

_json = msgspec.json.Encoder().encode


class ClientMessage(msgspec.Struct, frozen=True):
    """What a client sends."""

    id: str | None = None
    type: str | None = None
    key: str | None = None
    body: msgspec.Raw = msgspec.Raw()  # empty where there is none


_decode = msgspec.json.Decoder(ClientMessage).decode


class MessageLines:
    """Renders the events of one request as messages. The sibling of `sse.EventLines`."""

    def __init__(self, name: str, chunks: Chunks) -> None:
        self._chunks = chunks
        self._head = b'{"id":' + _json(name)

    def render(self, events: Sequence[Event]) -> list[bytes]:
        """Return the messages of some events."""
        messages = []
        for event in events:
            match event:
                case Shown(_, piece):
                    if (chunk := self._chunks.piece(piece)) is not None:
                        messages.append(self._chunk(chunk))
                case Complete(_, reasons, usage):
                    messages.append(self._chunk(self._chunks.finish(reasons)))
                    if (chunk := self._chunks.usage(usage)) is not None:
                        messages.append(self._chunk(chunk))
                    messages.append(self._head + b',"done":true}')
                case Broken(code, message):
                    messages.append(self._head + b"," + _error(refusal_of(code, message)))
        return messages

    def _chunk(self, chunk: bytes) -> bytes:
        return self._head + b',"chunk":' + chunk + b"}"


def _error(refusal: Refusal) -> bytes:
    return _json(refusal.body())[1:]


class Sockets:
    """The open WebSockets of this process."""

    def __init__(self, mailbox: Mailbox, admission: Admission) -> None:
        self.mailbox = mailbox
        self.admission = admission
        self.draining = False
        self._open: set[Socket] = set()

    @property
    def open_count(self) -> int:
        """How many sockets are open."""
        return len(self._open)

    def endpoint(self, *, chat: bool) -> Any:
        """Return the ASGI application of one path."""

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            socket = Socket(self, receive, send, chat=chat)
            self._open.add(socket)
            try:
                await socket.serve(scope, overloaded=len(self._open) > SOCKETS_MAX)
            finally:
                self._open.discard(socket)

        return serve

    def drain(self) -> None:
        """Take no further request; close each socket once its last one has ended."""
        self.draining = True
        for socket in self._open:
            socket.close_if_idle()


class Socket:
    """One client's socket, and the requests on it."""

    def __init__(self, sockets: Sockets, receive: Any, send: Any, *, chat: bool) -> None:
        self._sockets = sockets
        self._receive = receive
        self._send = send
        self._chat = chat
        self._tenant = ""
        self._closed = False
        self._running: dict[str, asyncio.Task[None]] = {}
        self._replies: dict[str, OpenReply] = {}
        self._closing: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(self, scope: Any, *, overloaded: bool) -> None:
        """Serve the socket to its end."""
        await self._receive()  # websocket.connect
        try:
            tenant = await self._sockets.admission.identify(scope["headers"])
        except Forbidden:
            await self._send({"type": "websocket.close"})  # answered by 403
            return
        except InvalidApiKey as refusal:
            await self._refuse(refusal)
            return
        await self._send({"type": "websocket.accept"})
        if overloaded or self._sockets.draining:
            await self._close(TRY_LATER if overloaded else GOING_AWAY)
            return
        reading = asyncio.create_task(self._read(tenant), name="websocket")
        try:
            either: list[asyncio.Future[Any]] = [reading, self._closing]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await self._close(self._closing.result())
            elif not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()
            await self._leave()

    async def _refuse(self, refusal: Refusal) -> None:
        await self._send({"type": "websocket.accept"})
        await self._close(POLICY, refusal.message)

    async def _close(self, code: int, reason: str = "") -> None:
        self._closed = True
        await self._send({"type": "websocket.close", "code": code, "reason": reason[:120]})

    async def _leave(self) -> None:
        for reply in self._replies.values():
            reply.leave()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def close_if_idle(self) -> None:
        """Close the socket for good when nothing runs on it and this node stops."""
        if self._sockets.draining and not self._running and not self._closing.done():
            self._closing.set_result(GOING_AWAY)

    async def _read(self, tenant: str | None) -> None:
        if tenant is None:
            try:
                async with asyncio.timeout(AUTH_S):
                    tenant = await self._authenticate()
            except (TimeoutError, Refusal) as error:
                await self._close(POLICY, str(error) or "No key came.")
                return
            if tenant is None:
                return
        self._tenant = tenant
        while (text := await self._next_text()) is not None:
            try:
                await self._take(text)
            except Refusal as refusal:
                await self._send_text(b'{"id":null,' + _error(refusal))

    async def _authenticate(self) -> str | None:
        """Return the tenant of the first message's key; None when the client has left."""
        text = await self._next_text()
        if text is None:
            return None
        message = _parse(text)
        if message.type != "auth" or not message.key:
            raise InvalidApiKey('The first message must be {"type": "auth", "key": KEY}.')
        return await self._sockets.admission.identify_key(message.key)

    async def _next_text(self) -> str | None:
        """Return the next message, None when the client has left."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        if text is None:
            await self._close(UNSUPPORTED, "Messages are text.")
        return text

    async def _take(self, text: str) -> None:
        """Act on one message. Raises a Refusal that belongs to no request."""
        message = _parse(text)
        if message.type == "auth":
            raise InvalidRequest("This socket is authenticated already.", param="type")
        name = message.id
        if name is None or not 0 < len(name) <= ID_CHARACTERS_MAX:
            raise InvalidRequest("'id' is a string of 1 to 256 characters.", param="id")
        if message.type == "cancel":
            if name in self._replies:
                self._replies[name].refuse(RequestCancelled("The request was cancelled."))
            return
        if message.type is not None or not bytes(message.body):
            raise InvalidRequest("A message holds a 'body', or is of type 'cancel'.", param="type")
        if name in self._running:
            raise InvalidRequest(f"A request with id {name!r} is running.", param="id")
        if len(self._running) >= REQUESTS_MAX:
            await self._send_error(name, TooManyRequests(f"{REQUESTS_MAX} requests are running."))
            return
        task = asyncio.create_task(self._run(name, bytes(message.body)), name=f"websocket {name}")
        self._running[name] = task
        task.add_done_callback(lambda _: self._ended(name))

    def _ended(self, name: str) -> None:
        self._running.pop(name, None)
        self.close_if_idle()

    async def _run(self, name: str, body: bytes) -> None:
        """Run one request to its end; the outermost frame of its task."""
        mailbox = self._sockets.mailbox
        deadline_s = time.time() + DEADLINE_S
        request = new_request_id()
        reply = mailbox.open(
            tenant=self._tenant,
            request=request,
            deadline_s=deadline_s,
            buffer_bytes_max=BUFFER_BYTES_MAX,
        )
        self._replies[name] = reply
        reply.writer = asyncio.current_task()
        admitted = False
        try:
            if self._sockets.draining:
                raise Draining("This node is stopping.")
            await self._sockets.admission.admit(
                self._tenant,
                body,
                chat=self._chat,
                request=request,
                streamer=mailbox.streamer,
                deadline_s=deadline_s,
            )
            admitted = True
            await self._relay(name, request, reply)
        except Refusal as refusal:
            await self._send_error(name, refusal)
        except asyncio.CancelledError:
            log.warning("%s: the socket was cut", request)
            self._cut()
        except Exception:
            log.exception("%s failed here", request)
            await self._send_error(name, InternalError("The server failed; the fault is ours."))
        finally:
            del self._replies[name]
            if admitted:
                await mailbox.finish(reply)
            else:
                mailbox.close(reply)

    def _cut(self) -> None:
        if not self._closing.done():
            self._closing.set_exception(StreamInterrupted("The client does not read."))

    async def _relay(self, name: str, request: str, reply: OpenReply) -> None:
        """Send a reply's messages to its end, or until the client leaves. Raises a Refusal."""
        lines: MessageLines | None = None
        while not reply.left:
            events = await reply.next()
            if events:
                if lines is None:
                    shape = reply.reply.shape
                    assert shape is not None  # events are handed over only when it is known
                    lines = MessageLines(name, Chunks(request, shape))
                reply.sending()
                for message in lines.render(events):
                    await self._send_text(message)
                reply.sent()
                if isinstance(events[-1], Complete | Broken):
                    return
            elif reply.refusal is not None:
                raise reply.refusal
            else:
                reply.sent()  # pings keep a quiet socket alive, no comment is needed

    async def _send_error(self, name: str, refusal: Refusal) -> None:
        await self._send_text(b'{"id":' + _json(name) + b"," + _error(refusal))

    async def _send_text(self, text: bytes) -> None:
        if self._closed:
            return
        with contextlib.suppress(OSError):  # gone meanwhile; the reader hears of it
            await self._send({"type": "websocket.send", "text": text.decode()})


def _parse(text: str) -> ClientMessage:
    try:
        return _decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"A message is a JSON object: {error}.") from None
