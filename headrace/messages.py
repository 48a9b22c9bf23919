"""What the door to NATS takes and gives: values and failures, without NATS itself."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

log = logging.getLogger(__name__)


class BrokerAway(Exception):
    """The broker cannot be reached, or did not answer in time."""


class NobodyAnswers(BrokerAway):
    """The broker is there, and knows that nobody listens on the subject."""


class BrokerRefused(Exception):
    """The broker said no. `code` is JetStream's error code (`err_code`), 0 if it gave none."""

    def __init__(self, description: str, *, code: int, status: int) -> None:
        super().__init__(description)
        self.description = description
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class BusSettings:
    """Where the broker is: one or more URLs (comma-separated), a credentials file, a CA file."""

    url: str
    creds: str | None = None
    ca: str | None = None


class Message(Protocol):
    """What a subscription's handler is given."""

    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str] | None: ...


Handler = Callable[[Message], Awaitable[None]]
Answerer = Callable[[bytes], Awaitable[bytes]]


class Stored(msgspec.Struct, frozen=True):
    """A stream took a message: its sequence, and whether it was there before."""

    seq: int
    duplicate: bool = False


class _Refusal(msgspec.Struct):
    code: int
    err_code: int = 0
    description: str = ""


class _PubAck(msgspec.Struct):
    error: _Refusal | None = None
    seq: int = 0
    duplicate: bool = False


_pub_ack = msgspec.json.Decoder(_PubAck)


def read_ack(answer: Message) -> Stored:
    """Read a stream's answer to a publish. Raises BrokerAway and BrokerRefused."""
    raise_no_responders(answer)
    ack = _pub_ack.decode(answer.data)
    if ack.error is not None:
        raise BrokerRefused(ack.error.description, code=ack.error.err_code, status=ack.error.code)
    return Stored(ack.seq, ack.duplicate)


def stored(answer: "asyncio.Future[Message]") -> Stored:
    """Read the future of `Bus.store_soon`. Raises BrokerAway and BrokerRefused."""
    return read_ack(answer.result())


def raise_no_responders(answer: Message) -> None:
    """Raise NobodyAnswers where the server says that nobody listens."""
    if answer.headers is not None and answer.headers.get("Status") == "503":
        raise NobodyAnswers("nobody answers: is JetStream on, and the stream there?")


class Taking(asyncio.Queue[Any]):
    """In place of a subscription's queue of messages: hands each on at once, and keeps none."""

    def __init__(self, subscription: Any, take: Callable[[Message], None]) -> None:
        super().__init__()
        self._subscription = subscription
        self._take = take

    def put_nowait(self, message: Any) -> None:
        """Hand a message on."""
        self._subscription._pending_size -= len(message.data)
        try:
            self._take(message)
        except Exception:  # it must not end the connection's reader
            log.exception("a message on %s was not taken", message.subject)
