"""What goes over a WebSocket. Rule: pure; a message that means nothing is a value, not a fault.

A client sends `{"id", "body", "timeout_s"}`, `{"id", "type": "cancel"}`, or first `{"type": "auth",
"key"}`.
Each message to it carries the `id` with one of `chunk`, `error` or `done`, and exactly one of the
last two ends a request. An error that belongs to no request has the id null.
"""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from headrace.deadline import bad_timeout, is_timeout
from schemas.depth import DEPTH_MAX, check_depth
from schemas.errors import InvalidRequest, Refusal, refusal_of
from schemas.reply import Broken, Complete, Event, Shown
from streamer.chunks import Chunks

ID_CHARACTERS_MAX: Final = 256
_REASON_BYTES_MAX: Final = 123  # RFC 6455, section 5.5: 125 bytes with the code
_PLACE: Final = re.compile(r" - at `\$\.?([^`]*)`$")

_json = msgspec.json.Encoder().encode


# From the client


class Auth(NamedTuple):
    """The client shows its key."""

    key: str


class Begin(NamedTuple):
    """A request begins; `timeout_s` None is the socket's."""

    id: str
    body: bytes
    timeout_s: float | None = None


class Cancel(NamedTuple):
    """A request is to end."""

    id: str


class Unclear(NamedTuple):
    """A message that cannot be acted on, and the id in it if there is one."""

    id: str | None
    refusal: Refusal


ClientMessage = Auth | Begin | Cancel | Unclear


MESSAGE_DEPTH_MAX: Final = DEPTH_MAX + 1
"""A body is a member of its message."""


class _Object(msgspec.Struct, frozen=True):
    id: str | None = None
    type: str | None = None
    key: str | None = None
    body: msgspec.Raw = msgspec.Raw()  # empty where there is none
    idempotency_key: msgspec.Raw = msgspec.Raw()
    timeout_s: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Object).decode


def read(text: str) -> ClientMessage:
    """Return what a message says."""
    try:
        check_depth(text.encode(errors="replace"), depth_max=MESSAGE_DEPTH_MAX)
        found = _decode(text)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        said = _PLACE.sub("", str(error))
        return Unclear(None, InvalidRequest(f"{said}.", param=(place and place[1]) or None))
    except InvalidRequest as refusal:
        return Unclear(None, refusal)
    except (msgspec.DecodeError, UnicodeError) as error:
        return Unclear(None, InvalidRequest(f"A message is a JSON object: {error}."))
    if found.type == "auth":
        return Auth(found.key or "")
    name = found.id
    if name is None or not 0 < len(name) <= ID_CHARACTERS_MAX:
        what = f"'id' is a string of 1 to {ID_CHARACTERS_MAX} characters."
        return Unclear(None, InvalidRequest(what, param="id"))
    if found.type == "cancel":
        return Cancel(name)
    if found.type is not None:
        what = "'type' is 'cancel' or 'auth'; a message that begins a request has none."
        return Unclear(name, InvalidRequest(what, param="type"))
    if bytes(found.idempotency_key) not in (b"", b"null"):
        what = "An idempotency key is for POSTs: on a socket a request is sent once."
        return Unclear(name, InvalidRequest(what, param="idempotency_key"))
    body = bytes(found.body)
    if not body:
        return Unclear(name, InvalidRequest("'body' is missing: the request.", param="body"))
    try:
        return Begin(name, body, _timeout_s(bytes(found.timeout_s)))
    except InvalidRequest as refusal:
        return Unclear(name, refusal)


def _timeout_s(raw: bytes) -> float | None:
    """Return the seconds that a message asks for, None for none. Raises InvalidRequest."""
    try:
        seconds = msgspec.json.decode(raw or b"null", type=float | None)
    except msgspec.MsgspecError:
        raise bad_timeout("timeout_s") from None
    if seconds is not None and not is_timeout(seconds):
        raise bad_timeout("timeout_s")
    return seconds


# To the client


class Close(NamedTuple):
    """The end of a socket: a code of RFC 6455, section 7.4, and a reason for people."""

    code: int
    reason: str = ""

    def fields(self) -> dict[str, int | str]:
        """Return the code, and the reason cut to what a close frame holds."""
        reason = self.reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore")
        return {"code": self.code, "reason": reason}


GOING_AWAY: Final = Close(1001, "This node is stopping.")
BINARY: Final = Close(1003, "Messages are text.")
NO_KEY: Final = Close(1008, "No key came.")
STALLED: Final = Close(1011, "The client does not read.")
FAULT: Final = Close(1011, "The server failed; the fault is ours.")
OVERLOADED: Final = Close(1013, "Too many sockets are open; try again later.")


class MessageLines:
    """Renders the events of one request as messages. The sibling of `sse.EventLines`."""

    def __init__(self, name: str, chunks: Chunks) -> None:
        self._chunks = chunks
        self._head = _head(name)
        self._opening = self._head + b'"chunk":'

    def opening(self) -> list[bytes]:
        """Return the messages that come first: none, before there is a token."""
        return []

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
                    messages.append(self._head + b'"done":true}')
                case Broken(code, message):
                    messages.append(self._head + _error(refusal_of(code, message)))
        return messages

    def _chunk(self, chunk: bytes) -> bytes:
        return self._opening + chunk + b"}"


def error_message(name: str | None, refusal: Refusal) -> bytes:
    """Return the message that ends a request with an error; None where it belongs to none."""
    return _head(name) + _error(refusal)


def _head(name: str | None) -> bytes:
    return b'{"id":' + _json(name) + b","


def _error(refusal: Refusal) -> bytes:
    return _json({"error": error_object(refusal)})[1:]


def error_object(refusal: Refusal) -> dict[str, Any]:
    """Return an error as a socket tells it; `headers` are those that a POST's answer would have."""
    error: dict[str, Any] = refusal.body()["error"]
    if refusal.retry_after_s is not None:
        error["headers"] = {"retry-after": str(refusal.retry_after_s)}
    return error
