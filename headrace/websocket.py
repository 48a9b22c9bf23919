"""uvicorn's WebSocket protocol, with its ends mended. Rule: a client always learns the close code,
and one that does not read is cut.

As it stands, uvicorn closes the connection right behind its close frame. Where it has not read all
that the client sent, the kernel makes that a reset, and the client never sees the frame: so for
messages that are too big. Where the client does not read, what it was sent keeps the connection
open for ever. And a server that stops says 1012 to every socket before its application, which knows
more, can say anything.
"""

from typing import Any, Final

import msgspec
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidState
from websockets.http11 import Response
from websockets.server import ServerProtocol

from headrace.connection import Connection, attach
from headrace.turnstile import Turnstile
from schemas.errors import error_body
from schemas.subjects import new_request_id

CLOSE_S: Final = 5.0
FRAGMENTS_MAX: Final = 65_536
"""Empty fragments add nothing to a message's size, but each is kept."""


class _Handshake(ServerProtocol):
    """The rules of the protocol, whose refusals of a handshake are in the API's shape."""

    def reject(self, status: Any, text: str) -> Response:
        response = super().reject(status, text)
        error = error_body(text.strip(), type_="invalid_request_error")
        body = msgspec.json.encode(error)
        headers = Headers(response.headers)
        for name in ("Content-Length", "Content-Type"):
            del headers[name]
        headers["Content-Length"] = str(len(body))
        headers["Content-Type"] = "application/json"
        headers["x-request-id"] = new_request_id()
        return Response(response.status_code, response.reason_phrase, headers, body)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket connection."""

    def __init__(self, *args: Any, turnstile: Turnstile, **more: Any) -> None:
        super().__init__(*args, **more)
        self._turnstile = turnstile
        self.conn = _Handshake(max_size=self.config.ws_max_size, logger=self.logger)
        self._late_pong = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, which came in as one of HTTP."""
        self._turnstile.leave(self.transport)
        super().connection_lost(exc)

    def handle_connect(self, event: Any) -> None:
        """Begin the socket's scope."""
        super().handle_connect(event)
        if self.handshake_initiated and not self.close_sent:
            attach(self.scope, Connection(self.transport, self.writable.set))

    async def send(self, message: Any) -> None:
        """Take a message of the application; OSError once there is no client any more."""
        if message["type"] == "websocket.send":
            await self.writable.wait()
            if self.disconnected or self.close_sent:
                raise ClientDisconnected
            try:
                self.conn.send_text(message["text"].encode())
            except InvalidState:
                raise ClientDisconnected from None
            self.transport.write(b"".join(self.conn.data_to_send()))
            return
        await super().send(message)
        if message["type"] == "websocket.accept":
            # The handshake's, whose parser holds on to it; a socket may be open for days.
            self.request.headers.clear()
            del self.request, self.response
        if self.close_sent:
            # After a refusal with a body uvicorn forgets that the handshake has its answer, and
            # would log each as a fault of ours.
            self.handshake_complete = True
            self._cut_later()

    def shutdown(self) -> None:
        """Close, as the server does. The application, which may have a last word for the client and
        a code of its own, has half of the server's grace for that."""
        if self.handshake_complete and not self.close_sent:
            patience_s = (self.config.timeout_graceful_shutdown or 0) / 2
            self.loop.call_later(patience_s, self._shut)
        else:
            super().shutdown()

    def _shut(self) -> None:
        if not self.disconnected:
            super().shutdown()

    async def run_asgi(self) -> None:
        """Run the application; it is over when that returns."""
        await super().run_asgi()
        self._cut_later()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client; after a fault of its, they are dropped."""
        if self.conn.parser_exc is not None:
            return
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # uvicorn hears of what can be read only, and would leave such a client waiting.
            self.handshake_initiated = self.handshake_complete = self.close_sent = True
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_ping(self) -> None:
        """Answer a ping. A client that does not read is owed the answer to its latest alone (RFC
        6455, section 5.5.3), or its pings would pile up here."""
        frames = self.conn.data_to_send()
        if self.writable.is_set() or self.conn.close_rcvd is not None:
            self.transport.write(b"".join(frames))
        elif frames:
            self._late_pong = frames[-1]

    def resume_writing(self) -> None:
        """Go on: the client has read most of what was written."""
        super().resume_writing()
        pong, self._late_pong = self._late_pong, b""
        if pong and not self.close_sent:
            self.transport.write(pong)

    def handle_cont(self, event: Any) -> None:
        """Take a further part of a message."""
        if len(self.frames) >= FRAGMENTS_MAX:
            self.conn.fail(1009, "too many fragments")
            self._fail()
            return
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Pass a whole message on, if it is what its kind says."""
        if self.close_sent:
            self.frames = []
            return
        if self.curr_msg_data_type == "text":
            data = b"".join(self.frames)
            self.frames = [data]
            try:
                data.decode()
            except UnicodeDecodeError:
                self.conn.fail(1007, "invalid UTF-8")
                self._fail()
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """Close after a fault of the client."""
        self._fail()

    def _fail(self) -> None:
        """Send the close frame that `conn` has prepared, and drop all that comes."""
        closed = self.conn.close_sent
        self.frames = []
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": closed.code if closed else 1006}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()  # what says to the client that it can close
        self._cut_later()

    def keepalive_timeout(self) -> None:
        """Close: no pong came."""
        super().keepalive_timeout()
        self._cut_later()

    def _cut_later(self) -> None:
        """Give the client some seconds to close; then cut it."""
        if self.disconnected:
            return
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(CLOSE_S, self.transport.abort)
