"""Many streams on one WebSocket. Rule: an error of one request never closes the socket.

What is said is in `messages`. The close codes are 1001 when this node stops, 1003 for binary, 1008
for a missing or wrong key, 1011 for a fault of ours or a client that does not read, 1013 when there
are too many sockets or no ingress answers; the protocol below us adds 1007 and 1009.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, assert_never

from headrace.connection import Connection
from headrace.deadline import DEADLINE_S, timeout_s_of
from headrace.handshake import Receive, Send, reject
from schemas.admit import Caller
from schemas.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    Refusal,
    RequestCancelled,
    StreamInterrupted,
    TooManyRequests,
)
from schemas.reply import Broken, Complete, Event
from schemas.subjects import new_request_id
from schemas.wire import Shape
from streamer import messages
from streamer.buffer import OpenReply
from streamer.chunks import Chunks
from streamer.eager import start
from streamer.messages import Auth, Begin, Cancel, Close, MessageLines, Unclear
from streamer.response_messages import ResponseMessages
from streamer.sockets import Room, Sockets

log = logging.getLogger(__name__)

REQUESTS_MAX: Final = 256
BUFFER_BYTES_MAX: Final = 16 * 1024
CLOSE_S: Final = 2.0
CHAT_BY_PATH: Final = {"/v1/chat/completions": True, "/v1/completions": False}

Lines = MessageLines | ResponseMessages


class _End(Exception):
    """The socket ends; None where the client has left it."""

    def __init__(self, close: Close | None) -> None:
        self.close = close


class Socket:
    """One client's socket, and the requests on it."""

    def __init__(
        self,
        sockets: Sockets,
        receive: Receive,
        send: Send,
        connection: Connection | None,
        *,
        chat: bool,
    ) -> None:
        self._sockets = sockets
        self._receive = receive
        self._send = send
        self._chat = chat
        self._connection = connection
        self._caller = Caller("")
        self._timeout_s = DEADLINE_S
        self._closed = False
        self._leaving = False
        # By the client's id, until its last message: then the id may be used again.
        self._replies: dict[str, OpenReply] = {}
        self._bodies: dict[str, bytes] = {}  # until each is read: its turn may take long
        # These last longer, by the time that a cancellation takes.
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Future[Close] = asyncio.get_running_loop().create_future()

    async def serve(self, headers: Sequence[tuple[bytes, bytes]], peer: str | None) -> None:
        """Serve the socket to its end."""
        caller, close = None, None
        try:
            caller = await self._sockets.admission.identify(headers, peer=peer)
            timeout = dict(headers).get(b"x-request-timeout")
            self._timeout_s = timeout_s_of(None if timeout is None else timeout.decode("latin-1"))
        except Refusal as refusal:
            if refusal.status in (400, 403):
                await reject(self._send, refusal)
                return
            close = _close_of(refusal)
        await self._send({"type": "websocket.accept"})
        if self._sockets.full:
            close = messages.OVERLOADED
        elif self._sockets.draining:
            close = messages.GOING_AWAY
        if close is None:
            close = await self._exchange(caller)
        if close is not None:
            await self._close(close)

    async def _exchange(self, caller: Caller | None) -> Close | None:
        """Take messages until the end, and return how to close; None when the client has left."""
        reading = asyncio.create_task(self._read(caller), name="websocket")
        try:
            either: list[asyncio.Future[Any]] = [reading, self._closing]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return self._closing.result()
            reading.result()
        except _End as end:
            return end.close
        except Exception:
            log.exception("a socket failed here")
            return messages.FAULT
        finally:
            reading.cancel()
            self._leaving = True
            for reply in self._replies.values():
                reply.leave()
            if self._connection is not None:
                self._connection.take_all()  # what is written now waits for a client that is gone
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return None

    async def _close(self, close: Close) -> None:
        """Say why the socket ends; a client that does not read is not waited for."""
        self._closed = True
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._send({"type": "websocket.close", **close.fields()})

    def close_if_idle(self) -> None:
        """Close the socket for good when nothing runs on it and this node stops."""
        if self._sockets.draining and not self._replies:
            self._close_soon(messages.GOING_AWAY)

    def _close_soon(self, close: Close) -> None:
        if not self._closing.done():
            self._closing.set_result(close)

    # What the client sends

    async def _read(self, caller: Caller | None) -> None:
        """Take messages for ever. Raises _End."""
        if caller is None:
            try:
                async with asyncio.timeout(self._sockets.auth_s):
                    caller = await self._authenticate()
            except TimeoutError:
                raise _End(messages.NO_KEY) from None
            except Refusal as refusal:
                raise _End(_close_of(refusal)) from None
        self._caller = caller
        while True:
            await self._take(await self._next_text())

    async def _authenticate(self) -> Caller:
        """Return whose key the first message shows. Raises a Refusal or _End."""
        match messages.read(await self._next_text()):
            case Auth(key) if key:
                return await self._sockets.admission.identify_key(key)
        raise InvalidApiKey('The first message must be {"type": "auth", "key": KEY}.')

    async def _next_text(self) -> str:
        """Return the next message. Raises _End."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise _End(None)
        text: str | None = message.get("text")
        if text is None:
            raise _End(messages.BINARY)
        return text

    async def _take(self, text: str) -> None:
        """Act on one message."""
        message = messages.read(text)
        match message:
            case Begin(name, body, timeout_s):
                await self._begin(name, body, timeout_s or self._timeout_s)
            case Cancel(name):
                if name in self._replies:
                    self._replies[name].refuse(RequestCancelled("The request was cancelled."))
            case Auth():
                what = "This socket is authenticated already."
                await self._send_error(None, InvalidRequest(what, param="type"))
            case Unclear(name, refusal):
                # What runs under this id must not seem to have ended.
                await self._send_error(None if name in self._replies else name, refusal)
            case _:
                assert_never(message)

    # Requests

    async def _begin(self, name: str, body: bytes, timeout_s: float) -> None:
        if name in self._replies:
            what = InvalidRequest(f"A request with id {name!r} is running.", param="id")
            await self._send_error(None, what)
        elif len(self._replies) >= REQUESTS_MAX:
            await self._send_error(name, TooManyRequests(f"{REQUESTS_MAX} requests are running."))
        else:
            self._start(name, new_request_id(), body, timeout_s)

    def _start(self, name: str, request: str, body: bytes, timeout_s: float) -> None:
        reply = self._replies[name] = self._sockets.mailbox.open(
            tenant=self._caller.tenant,
            request=request,
            deadline_s=time.time() + timeout_s,
            buffer_bytes_max=BUFFER_BYTES_MAX,
        )
        reply.queued = False
        reply.connection = self._connection
        self._bodies[name] = body
        task = reply.writer = asyncio.create_task(self._run(name, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, name: str, reply: OpenReply) -> None:
        """Run one request to its end; the outermost frame of its task."""
        mailbox = self._sockets.mailbox
        admitted = False
        try:
            await self._admit(name, reply)
            reply.now_queued(now_s=time.monotonic())
            admitted = True
            last = await self._relay(name, reply)
        except Refusal as refusal:
            last = self._error(name, refusal)
        except asyncio.CancelledError:
            self._stalled(reply)
            last = None
        except Exception:
            log.exception("%s failed here", reply.request)
            fault = InternalError("The server failed; the fault is ours.")
            last = self._error(name, fault)
        del self._replies[name]
        self._bodies.pop(name, None)
        try:
            if last is not None:
                reply.sending()
                await self._send_text(last)
        except asyncio.CancelledError:
            self._stalled(reply)
        finally:
            self.close_if_idle()
            if admitted:
                await mailbox.finish(reply)
            else:
                mailbox.close(reply)
            reply.release()

    def _stalled(self, reply: OpenReply) -> None:
        """End the socket, whose client does not read: its requests may be resumed elsewhere."""
        log.warning("%s: the socket was cut", reply.request)
        for each in self._replies.values():
            each.refuse(StreamInterrupted("The client did not read for long; resume the stream."))
        if self._connection is not None:
            self._connection.take_all()  # the close frame, most of all
        self._close_soon(messages.STALLED)

    async def _admit(self, name: str, reply: OpenReply) -> None:
        if self._sockets.draining:
            raise Draining("This node is stopping.")
        try:
            async with asyncio.timeout(max(0.0, reply.deadline_s - time.time())):
                reply.model = await self._put(name, reply)
        except RequestCancelled as cancelled:
            raise reply.refusal or cancelled from None
        except TimeoutError:
            # Should it be admitted yet, no worker starts it: its deadline has passed.
            raise DeadlineExceeded("The request's deadline has passed.") from None

    async def _put(self, name: str, reply: OpenReply) -> str:
        """Have a request put into the queue, and return its model. Raises a Refusal."""
        return await self._sockets.admission.admit(
            self._caller,
            self._bodies.pop(name),
            chat=self._chat,
            request=reply.request,
            streamer=self._sockets.mailbox.streamer,
            deadline_s=reply.deadline_s,
            left=reply.abandoned,
        )

    async def _relay(self, name: str, reply: OpenReply) -> bytes | None:
        """Send a reply's messages and return the last one; None when the client has left.

        Raises a Refusal.
        """
        lines: Lines | None = None
        while not reply.left:
            events = await reply.next()
            texts: list[bytes] = []
            if lines is None and (events or reply.opening_due):
                shape = reply.reply.shape
                assert shape is not None  # events are handed over only when it is known
                lines = self._lines(name, shape)
                texts = lines.opening()
                reply.write_now = self._writing(lines)
            reply.opening_due = False
            if events or texts:
                assert lines is not None
                texts += lines.render(events)
                ended = bool(events) and isinstance(events[-1], Complete | Broken)
                last = texts.pop() if ended else None
                reply.sending()
                await self._send_all(texts)
                reply.sent()
                if last is not None:
                    return last
            elif reply.refusal is not None:
                raise reply.refusal
            else:
                reply.sent()  # pings keep a quiet socket alive, no comment is needed
        return None

    def _lines(self, name: str, shape: Shape) -> Lines:
        """Return what renders a reply."""
        return MessageLines(name, Chunks(self._replies[name].request, shape))

    def _error(self, name: str | None, refusal: Refusal) -> bytes:
        """Return the message that ends a request with an error."""
        return messages.error_message(name, refusal)

    def _writing(self, lines: Lines) -> Callable[[Sequence[Event]], Awaitable[None] | None]:
        """Return what writes tokens at once, without waking their request's task."""

        def write(events: Sequence[Event]) -> Awaitable[None] | None:
            return start(self._send_all(lines.render(events)))

        return write

    async def _send_error(self, name: str | None, refusal: Refusal) -> None:
        await self._send_text(self._error(name, refusal))

    async def _send_all(self, texts: Sequence[bytes]) -> None:
        for text in texts:
            await self._send_text(text)

    async def _send_text(self, text: bytes) -> None:
        if self._closed:
            return
        with contextlib.suppress(OSError):  # gone meanwhile; the reader hears of it
            await self._send({"type": "websocket.send", "text": text.decode()})


def _close_of(refusal: Refusal) -> Close:
    """Return how a socket ends whose client could not be identified."""
    return Close(1008 if refusal.status == 401 else 1013, refusal.message)


ROOMS: Final[dict[str, Room]] = {
    path: partial(Socket, chat=chat) for path, chat in CHAT_BY_PATH.items()
}
"""What is served at each path."""
