"""The typed events of a response on their way to a client: as server-sent events, or as messages of
a socket. The siblings of `sse.EventLines`, `collect.Collected` and `messages.MessageLines`.

The `id` of an event is its sequence number. As OpenAI's, such a stream has no [DONE].
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.errors import Refusal
from schemas.reply import Complete, Event, Shown
from schemas.response_events import Rendered, ResponseEvents
from schemas.wire import Shape


class ResponseLines:
    """Renders one stream; of a resumed one, what comes after the sequence number `after`."""

    def __init__(self, events: ResponseEvents, *, after: int = -1, ids: bool = True) -> None:
        self._events = events
        self._after = after
        self._ids = ids

    def opening(self) -> bytes:
        """Return the bytes of what comes first."""
        return self._lines(self._events.opening())

    def render(self, events: Sequence[Event]) -> bytes:
        """Return the bytes of some events, all of them in one write."""
        return self._lines(self._events.render(events))

    def error(self, refusal: Refusal) -> bytes:
        """Return the event that ends the stream with an error; it has no id."""
        return b"event: error\ndata: %b\n\n" % self._events.error(refusal).body

    def _lines(self, events: Sequence[Rendered]) -> bytes:
        return b"".join([self._line(*event) for event in events])

    def _line(self, name: str, seq: int, body: bytes) -> bytes:
        if name == "error":
            return b"event: error\ndata: %b\n\n" % body
        if seq <= self._after:
            return b""
        if self._ids:
            return b"event: %b\nid: %d\ndata: %b\n\n" % (name.encode(), seq, body)
        return b"event: %b\ndata: %b\n\n" % (name.encode(), body)


class CollectedResponse:
    """Gathers one reply to the response object, for `stream: false`."""

    def __init__(self, request: str, shape: Shape) -> None:
        self._events = ResponseEvents(request, shape)
        self._events.opening()

    def add(self, event: Shown) -> None:
        """Take the next piece."""
        self._events.piece(event.piece)

    def answer(self, complete: Complete) -> Any:
        """Return the object for the whole reply."""
        self._events.render([complete])
        return msgspec.Raw(self._events.response())
