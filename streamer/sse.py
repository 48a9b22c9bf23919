"""Events of a reply as server-sent events (WHATWG HTML, section 9.2).

One event per token, `id` the seq of its last token, so that `Last-Event-ID` says where to go on.
An error event has no id and nothing follows it; `[DONE]` ends every other stream. A request may ask
for events without ids (`stream_options.include_event_ids`): some clients read `data:` lines alone,
and fail at any other field.
"""

from collections.abc import Sequence
from typing import Final

from headrace.event_source import error_event
from schemas.errors import Refusal, refusal_of
from schemas.reply import Broken, Complete, Event, Shown
from schemas.wire import Piece
from streamer.chunks import Chunks

COMMENT: Final = b": waiting\n"
"""A line, with no blank one after it: OpenAI's SDK, once it has seen an id, would take that for an
event without data, and fail."""
DONE: Final = b"data: [DONE]\n\n"


class EventLines:
    """Renders the events of one stream; of a resumed one, those after the event id `after`."""

    def __init__(self, chunks: Chunks, *, after: int = -1, ids: bool = True) -> None:
        self._chunks = chunks
        self._after = after
        self._ids = ids

    def opening(self) -> bytes:
        """Return the bytes of what comes first: nothing, before there is a token."""
        return b""

    def error(self, refusal: Refusal) -> bytes:
        """Return the event that ends the stream with an error."""
        return error_event(refusal)

    def render(self, events: Sequence[Event]) -> bytes:
        """Return the bytes of some events, all of them in one write."""
        if len(events) == 1 and type(events[0]) is Shown:  # nearly always
            return self._token(*events[0])
        lines = []
        for event in events:
            match event:
                case Shown(seq, piece):
                    lines.append(self._token(seq, piece))
                case Complete(seq, reasons, usage):
                    lines.append(self._event(seq, self._chunks.finish(reasons)))
                    lines.append(self._event(seq + 1, self._chunks.usage(usage)))
                    lines.append(DONE)
                case Broken(code, message):
                    lines.append(error_event(refusal_of(code, message)))
        return b"".join(lines)

    def _token(self, seq: int, piece: Piece) -> bytes:
        # Rendered even where it is not sent: the first token of a choice carries its role.
        return self._event(seq, self._chunks.piece(piece))

    def _event(self, seq: int, chunk: bytes | None) -> bytes:
        if chunk is None or seq <= self._after:
            return b""
        return b"id: %d\ndata: %b\n\n" % (seq, chunk) if self._ids else b"data: %b\n\n" % chunk
