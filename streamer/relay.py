"""Carries one reply to one HTTP client, as a stream or as one object.

ASGI directly, without a framework's response class: a token costs one `send` and nothing else.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.connection import connection_of
from headrace.event_source import RETRY, error_event
from schemas.errors import InternalError, Refusal, StreamInterrupted, refusal_of
from schemas.reply import Broken, Complete, Event, Shown
from schemas.response_events import ResponseEvents
from streamer.buffer import OpenReply
from streamer.chunks import Chunks
from streamer.collect import Collected
from streamer.eager import start
from streamer.mailbox import Mailbox
from streamer.response_lines import CollectedResponse, ResponseLines
from streamer.sse import COMMENT, DONE, EventLines

log = logging.getLogger(__name__)

CUT: Final = StreamInterrupted("The stream was cut; resume it.")
CUT_S: Final = 10.0
"""How long a client that was cut may take to begin to read what it was sent last."""

Scope = Any
Receive = Any
Send = Any


class Relay:
    """An ASGI response that relays a reply until its end, or until the client leaves."""

    def __init__(
        self,
        mailbox: Mailbox,
        reply: OpenReply,
        *,
        stream: bool,
        headers: Mapping[str, str],
        after: int = -1,
        returns: bool = False,
    ) -> None:
        """`after` is the id of the last event that the client of a resumed stream has; `returns`
        says that it asks again by itself after the end, until it is answered with 204."""
        self._mailbox = mailbox
        self._reply = reply
        self._stream = stream
        self._begun = False
        self._written: EventLines | ResponseLines | None = None  # what renders the events
        self._after = after
        self._returns = returns
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self._reply
        reply.writer = asyncio.current_task()
        reply.connection = connection_of(scope)
        watcher = asyncio.create_task(_watch(receive, reply), name="disconnect")
        try:
            if self._stream:
                await self._send_events(send)
            else:
                await self._send_object(send)
        except asyncio.CancelledError:
            # The client has not left: it does not read, or this node ends and waits no longer.
            log.warning("%s: the connection was cut", reply.request)
            reply.refuse(CUT)
            if not self._begun:
                raise
            await self._cut(send)
        finally:
            watcher.cancel()
            await self._mailbox.finish(reply)
            reply.release()

    async def _send_events(self, send: Send) -> None:
        reply = self._reply
        lines: EventLines | ResponseLines | None = None
        while not reply.left:
            if not (self._begun or (self._returns and await reply.look())):
                await self._begin(send)
            events = await reply.next()
            body = b""
            if lines is None and (events or reply.opening_due):
                lines = self._written = self._lines()
                body = lines.opening()
                reply.write_now = _writing(lines, send, reply)
            reply.opening_due = False
            if events:
                assert lines is not None
                body += lines.render(events)
                ended = isinstance(events[-1], Complete | Broken)
            elif reply.refusal is not None:
                body += error_event(reply.refusal) if lines is None else lines.error(reply.refusal)
                ended = True
            else:
                body = body or (COMMENT if reply.comment_due else b"")
                ended = False
            if body or ended:
                reply.sending()
                if not self._begun and body in (b"", DONE):
                    await self._send_nothing(send)
                    return
                await self._begin(send)
                await send({"type": "http.response.body", "body": body, "more_body": not ended})
                reply.sent()
            if ended:
                return

    async def _begin(self, send: Send) -> None:
        """Send the head of a stream, once."""
        if self._begun:
            return
        await self._send_head(send, 200, "text/event-stream; charset=utf-8")
        self._begun = True
        if self._returns:
            await send({"type": "http.response.body", "body": RETRY, "more_body": True})

    async def _send_nothing(self, send: Send) -> None:
        """Answer a client that has seen all of an ended stream."""
        headers = [(b"cache-control", b"no-store"), *self._headers]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def _cut(self, send: Send) -> None:
        """Tell a client that its stream ends here, without waiting for what it has yet to read."""
        connection = self._reply.connection
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        if connection is None:
            return
        connection.take_all()
        refusal = self._reply.refusal or CUT  # a reply that has ended refuses no more
        body = error_event(refusal) if self._written is None else self._written.error(refusal)
        await send({"type": "http.response.body", "body": body, "more_body": False})
        connection.close(still_s=CUT_S)

    def _lines(self) -> EventLines | ResponseLines:
        shape = self._reply.reply.shape
        assert shape is not None  # events are handed over only when it is known
        if shape.endpoint == "response":
            response = ResponseEvents(self._reply.request, shape)
            return ResponseLines(response, after=self._after, ids=shape.event_ids)
        chunks = Chunks(self._reply.request, shape)
        return EventLines(chunks, after=self._after, ids=shape.event_ids)

    async def _send_object(self, send: Send) -> None:
        reply = self._reply
        collected: Collected | CollectedResponse | None = None
        while not reply.left:
            events = await reply.next()
            if events and collected is None:
                shape = reply.reply.shape
                assert shape is not None
                kind = CollectedResponse if shape.endpoint == "response" else Collected
                collected = kind(reply.request, shape)
            for event in events:
                assert collected is not None
                match event:
                    case Shown():
                        collected.add(event)
                    case Complete():
                        await self._send_json(send, 200, collected.answer(event))
                        return
                    case Broken(code, message):
                        await self._send_refusal(send, refusal_of(code, message))
                        return
            if reply.refusal is not None:
                await self._send_refusal(send, reply.refusal)
                return
            reply.comment_due = reply.opening_due = False

    async def _send_refusal(self, send: Send, refusal: Refusal) -> None:
        if refusal.retry_after_s is not None:
            self._headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
        await self._send_json(send, refusal.status, refusal.body())

    async def _send_json(self, send: Send, status: int, body: Any) -> None:
        try:
            content = msgspec.json.encode(body)
        except (msgspec.MsgspecError, TypeError):
            log.exception("%s: an answer that is no JSON", self._reply.request)
            status, content = 500, msgspec.json.encode(InternalError("Bad answer.").body())
        self._headers.append((b"content-length", str(len(content)).encode()))
        await self._send_head(send, status, "application/json")
        await send({"type": "http.response.body", "body": content})

    async def _send_head(self, send: Send, status: int, media_type: str) -> None:
        headers = [
            (b"content-type", media_type.encode()),
            (b"cache-control", b"no-store"),
            # nginx would hold the stream back to fill its buffers.
            (b"x-accel-buffering", b"no"),
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})


def _writing(
    lines: EventLines | ResponseLines, send: Send, reply: OpenReply
) -> Callable[[Sequence[Event]], Awaitable[None] | None]:
    """Return what writes tokens at once, without waking this reply's task."""

    def write(events: Sequence[Event]) -> Awaitable[None] | None:
        body = lines.render(events)
        if not body:
            return None
        reply.wrote()
        return start(send({"type": "http.response.body", "body": body, "more_body": True}))

    return write


async def _watch(receive: Receive, reply: OpenReply) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.leave()
