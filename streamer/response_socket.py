"""Responses on one WebSocket. Rule: those of one `stream_id` run one after another, in the order
they came; those of different ones side by side. All without a `stream_id` are one stream too.

What waits and what is remembered for later turns is bounded by the socket; bounds, keys, pings and
close codes are those of every socket.
"""

from collections import OrderedDict, deque
from typing import Final, assert_never

import msgspec

from headrace.connection import Connection
from headrace.handshake import Receive, Send
from schemas.errors import Refusal, RequestCancelled, TooManyRequests
from schemas.response_events import ResponseEvents
from schemas.responses import request_of
from schemas.subjects import new_request_id
from schemas.wire import Shape
from streamer import response_messages
from streamer.buffer import OpenReply
from streamer.response_messages import CancelResponse, Create, ResponseMessages, Unclear
from streamer.sockets import Room, Sockets
from streamer.websocket import REQUESTS_MAX, Socket

PATH: Final = "/v1/responses"
WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
TURNS_BYTES_MAX: Final = 4 * 1024 * 1024


class Turns:
    """What was said in the last turns that are stored nowhere, by response; the oldest go first."""

    def __init__(self, bytes_max: int = TURNS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._turns: OrderedDict[str, bytes] = OrderedDict()

    def get(self, request: str | None) -> bytes | None:
        """Return the conversation up to a response and with it, as JSON."""
        return None if request is None else self._turns.get(request)

    def put(self, request: str, conversation: bytes) -> None:
        """Remember a conversation, unless it is too long."""
        self._turns[request] = conversation
        self._bytes += len(conversation)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._turns.popitem(last=False)[1])


class ResponseSocket(Socket):
    """One client's socket, and the responses on it, by the ids of their requests."""

    def __init__(
        self, sockets: Sockets, receive: Receive, send: Send, connection: Connection | None
    ) -> None:
        super().__init__(sockets, receive, send, connection, chat=True)
        self._running: dict[str, Create] = {}
        # By stream, one that runs or has just ended, and those that wait behind it.
        self._waiting: dict[str | None, deque[tuple[str, Create]]] = {}
        self._waiting_count = 0
        self._waiting_bytes = 0
        self._turns = Turns()
        self._rendering: dict[str, ResponseMessages] = {}
        self._made_from: dict[str, bytes] = {}  # only of those that are stored nowhere

    async def _take(self, text: str) -> None:
        message = response_messages.read(text)
        match message:
            case Create():
                await self._create(message)
            case CancelResponse(response_id):
                reply = self._replies.get(request_of(response_id) or "")
                if reply is not None:
                    reply.refuse(RequestCancelled("The request was cancelled."))
            case Unclear(stream_id, refusal):
                await self._send_text(response_messages.error_message(stream_id, refusal))
            case _:
                assert_never(message)

    async def _create(self, create: Create) -> None:
        """Begin a response, or have it wait for those before it in its stream."""
        name = new_request_id()
        waiting = self._waiting.get(create.stream_id)
        if waiting is None and len(self._replies) + self._waiting_count < REQUESTS_MAX:
            self._waiting[create.stream_id] = deque()
            self._begin_response(name, create)
            return
        full = len(self._replies) + self._waiting_count >= REQUESTS_MAX
        if waiting is None or full or self._waiting_bytes + len(create.body) > WAITING_BYTES_MAX:
            what = "As many responses run or wait on this socket as may."
            await self._send_text(
                response_messages.error_message(create.stream_id, TooManyRequests(what))
            )
            return
        waiting.append((name, create))
        self._waiting_count += 1
        self._waiting_bytes += len(create.body)

    def _begin_response(self, name: str, create: Create) -> None:
        self._running[name] = create._replace(body=b"")
        self._start(name, name, create.body, self._timeout_s)

    async def _run(self, name: str, reply: OpenReply) -> None:
        try:
            await super()._run(name, reply)
        finally:
            self._rendering.pop(name, None)
            self._made_from.pop(name, None)
            create = self._running.pop(name)
            self._begin_next(create.stream_id)

    def _begin_next(self, stream_id: str | None) -> None:
        waiting = self._waiting[stream_id]
        if not waiting or self._leaving or self._closed:
            del self._waiting[stream_id]
            self.close_if_idle()
            return
        name, create = waiting.popleft()
        self._waiting_count -= 1
        self._waiting_bytes -= len(create.body)
        self._begin_response(name, create)

    def close_if_idle(self) -> None:
        """As for every socket; who waits is told that this node stops, before it is closed."""
        if not self._waiting_count:
            super().close_if_idle()

    async def _put(self, name: str, reply: OpenReply) -> str:
        create = self._running[name]
        admitted = await self._sockets.admission.admit_response(
            self._caller,
            self._bodies.pop(name),
            request=reply.request,
            streamer=self._sockets.mailbox.streamer,
            deadline_s=reply.deadline_s,
            before=self._turns.get(request_of(create.previous or "")),
            left=reply.abandoned,
        )
        made_from = admitted.made_from
        if made_from is not None and len(made_from) <= TURNS_BYTES_MAX:  # else never remembered
            self._made_from[name] = made_from
        if admitted.frames:
            reply.give(admitted.frames)
        # At once, not when a worker begins: who knows a response's id can cancel it.
        reply.sending()
        await self._send_all(self._lines(reply.request, admitted.shape).opening())
        reply.sent()
        return admitted.shape.model

    async def _relay(self, name: str, reply: OpenReply) -> bytes | None:
        last = await super()._relay(name, reply)
        events, made_from = self._rendering[name].events, self._made_from.get(name)
        if made_from is not None and events.gone_on_from:
            items = msgspec.json.decode(made_from, type=list[msgspec.Raw])
            items += [msgspec.Raw(msgspec.json.encode(item)) for item in events.output()]
            self._turns.put(name, msgspec.json.encode(items))
        return last

    def _lines(self, name: str, shape: Shape) -> ResponseMessages:
        if name not in self._rendering:
            stream_id = self._running[name].stream_id
            self._rendering[name] = ResponseMessages(ResponseEvents(name, shape), stream_id)
        return self._rendering[name]

    def _error(self, name: str | None, refusal: Refusal) -> bytes:
        create = self._running.get(name or "")
        return response_messages.error_message(create and create.stream_id, refusal)


ROOMS: Final[dict[str, Room]] = {PATH: ResponseSocket}
