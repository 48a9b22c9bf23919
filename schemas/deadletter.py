"""What is kept of a request that was given up, in the stream `DEADLETTERS`, as msgpack."""

import msgspec

from schemas.wire import WIRE_VERSION


class PastAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a request that was given up: by whom, when it was first and last heard (seconds
    since the epoch), the tokens the reply had by then, and how it ended."""

    worker: str
    started_s: float
    heard_s: float
    tokens: int
    ended: str  # died, released, outlived or ended


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was given up, kept for operators; `envelope` is as it was published, or empty
    where the letter would have been over the broker's payload limit.

    `place` is the subject that it was published under, empty in a letter of an older worker.
    """

    version: int = WIRE_VERSION
    request: str
    tenant: str
    model: str
    reason: str
    died_s: float  # seconds since the epoch
    tokens: int
    envelope: bytes
    place: str = ""
    history: tuple[PastAttempt, ...] = ()


_letter_decoder = msgspec.msgpack.Decoder(DeadLetter)


class BadLetter(Exception):
    """The bytes are no dead letter of a version that this node reads."""


def encode_letter(letter: DeadLetter) -> bytes:
    """Return the bytes of a dead letter."""
    return msgspec.msgpack.encode(letter)


def decode_letter(data: bytes) -> DeadLetter:
    """Read a dead letter. Raises BadLetter for other bytes or a newer version."""
    try:
        letter = _letter_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise BadLetter(str(error)) from error
    if letter.version != WIRE_VERSION:
        raise BadLetter(f"version {letter.version}")
    return letter
