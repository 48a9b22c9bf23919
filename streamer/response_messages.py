"""What goes over a WebSocket at /v1/responses, as OpenAI documents its mode. Rule: pure; a message
that means nothing is a value, not a fault.

A client sends `response.create`: the body of a POST with a `type` and perhaps a `stream_id`, or
`response.cancel` with a `response_id`. It is sent the events of a POST's stream, each with the
`stream_id` of the request, and errors as `{"type": "error", "status", "error", "stream_id"}`.
"""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from schemas.depth import check_depth
from schemas.errors import InvalidRequest, Refusal, RequestCancelled
from schemas.reply import Event
from schemas.response_events import Rendered, ResponseEvents
from streamer.messages import error_object

STREAM_ID_CHARACTERS_MAX: Final = 256
_PLACE: Final = re.compile(r" - at `\$\.?([^`]*)`$")

_json = msgspec.json.Encoder().encode


# From the client


class Create(NamedTuple):
    """A response begins, perhaps after a previous one."""

    stream_id: str | None
    body: bytes
    previous: str | None


class CancelResponse(NamedTuple):
    """A response is to end."""

    response_id: str


class Unclear(NamedTuple):
    """A message that cannot be acted on, and the stream that it names if it does."""

    stream_id: str | None
    refusal: Refusal


ResponseMessage = Create | CancelResponse | Unclear


class _Object(msgspec.Struct, frozen=True):
    type: str | None = None
    stream_id: str | None = None
    response_id: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None


_decode = msgspec.json.Decoder(_Object).decode


def read(text: str) -> ResponseMessage:
    """Return what a message says."""
    try:
        check_depth(text.encode(errors="replace"))
        found = _decode(text)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        said = _PLACE.sub("", str(error))
        return Unclear(None, InvalidRequest(f"{said}.", param=(place and place[1]) or None))
    except InvalidRequest as refusal:
        return Unclear(None, refusal)
    except (msgspec.DecodeError, UnicodeError) as error:
        return Unclear(None, InvalidRequest(f"A message is a JSON object: {error}."))
    stream_id = found.stream_id
    if stream_id is not None and not 0 < len(stream_id) <= STREAM_ID_CHARACTERS_MAX:
        what = f"'stream_id' is a string of 1 to {STREAM_ID_CHARACTERS_MAX} characters."
        return Unclear(None, InvalidRequest(what, param="stream_id"))
    match found.type:
        case "response.create":
            if found.background:
                what = "'background' is for POSTs: on a socket a response is streamed."
                return Unclear(stream_id, InvalidRequest(what, param="background"))
            try:
                body = text.encode()
            except UnicodeEncodeError:  # half a surrogate pair
                return Unclear(stream_id, InvalidRequest("The message is not valid Unicode."))
            return Create(stream_id, body, found.previous_response_id)
        case "response.cancel":
            if not found.response_id:
                what = "'response_id' is missing: the response to cancel."
                return Unclear(stream_id, InvalidRequest(what, param="response_id"))
            return CancelResponse(found.response_id)
    what = "'type' is 'response.create' or 'response.cancel'."
    return Unclear(stream_id, InvalidRequest(what, param="type"))


# To the client


class ResponseMessages:
    """Renders the events of one response as messages. The sibling of `messages.MessageLines`."""

    def __init__(self, events: ResponseEvents, stream_id: str | None) -> None:
        self.events = events
        self._stream_id = stream_id
        self._opened = False
        self._end = b"}" if stream_id is None else b',"stream_id":%b}' % _json(stream_id)

    def opening(self) -> list[bytes]:
        """Return the messages that come first, the first time."""
        if self._opened:
            return []
        self._opened = True
        return [self._message(event) for event in self.events.opening()]

    def render(self, events: Sequence[Event]) -> list[bytes]:
        """Return the messages of some events."""
        return [self._message(event) for event in self.events.render(events)]

    def _message(self, event: Rendered) -> bytes:
        if event.name == "error":  # the only end of a reply that is an error is a cancellation
            return error_message(self._stream_id, RequestCancelled("The request was cancelled."))
        return event.body[:-1] + self._end


def error_message(stream_id: str | None, refusal: Refusal) -> bytes:
    """Return the event of an error; `stream_id` is None where it belongs to no stream."""
    error = error_object(refusal)
    body: dict[str, Any] = {"type": "error", "status": refusal.status, "error": error}
    return _json(body if stream_id is None else body | {"stream_id": stream_id})
