"""What travels over the broker: the request's envelope, and the frames of its reply.

Frames are msgpack arrays `[version, attempt, seq, kind, …]`, one message per engine step and
request. `seq` counts the tokens and the terminal frame of the request from 0 without a hole;
`started`, `keepalive` and `released` do not use it. A frame that holds several pieces carries the
seq of its first token. A checkpoint repeats the pieces since the last acknowledged one, so a reader
drops what it has. Exactly one terminal frame (`finished` or `failed`) ends a reply.

An attempt is numbered by REPLIES: its number is the stream sequence of its `started` claim, which
is published first, with attempt 0 for "the log will say". Readers decide by one rule, whatever the
order of arrival: the token at seq s belongs to the highest attempt whose `resume_at` is ≤ s.
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgpack
import msgspec

from schemas.sampling import Parsing as Parsing
from schemas.sampling import Sampling as Sampling
from schemas.sampling import Structured as Structured

WIRE_VERSION: Final = 1

Wire = int | float | str | bytes | None | Sequence["Wire"] | dict[str, "Wire"]


class BadFrame(Exception):
    """The bytes are no frame of a version that this node reads."""


class Shape(NamedTuple):
    """What a reader must know to render a reply: it is in the log, so a replay is byte-equal."""

    endpoint: str  # "chat", "completion" or "response"
    model: str
    created_s: int
    include_usage: bool
    choices: int
    logprobs: bool
    keep: bool = False  # whether the request runs on when its last reader leaves
    event_ids: bool = True
    response: bytes = b""  # JSON: what a Responses object repeats of its request
    echo: str = ""  # what stands before the text of each choice


class TopToken(NamedTuple):
    """A token the engine could have chosen, with its log probability (may be -inf)."""

    text: str
    logprob: float


class TokenLogprob(NamedTuple):
    """The log probability of a token, and the likeliest ones in its place."""

    text: str
    logprob: float
    top: tuple[TopToken, ...]


class Piece(NamedTuple):
    """What one engine step added to one choice.

    `text` may be empty while bytes of a character or a possible stop string are held back.
    `tokens` are the ids made, at least one. `delta` holds further members of a chat delta, such as
    `tool_calls`.
    """

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    delta: dict[str, Any] | None = None


class Usage(NamedTuple):
    """What a request used, in tokens; `reasoning_tokens`, of the completion's, are None where
    nothing tells reasoning apart, and are not written then."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None

    @property
    def written(self) -> tuple[int | None, ...]:
        """The members as a frame holds them."""
        return self[:3] if self.reasoning_tokens is None else self


class Started(NamedTuple):
    """An attempt begins. `attempt` is 0 in the claim that the log numbers.

    `resume_at` is the seq of the attempt's first token, or None while the claimant has yet to read
    what is in the log.
    """

    attempt: int
    worker: str
    resume_at: int | None
    shape: Shape


class Tokens(NamedTuple):
    """Pieces of the reply, the first of them at `seq`."""

    attempt: int
    seq: int
    pieces: tuple[Piece, ...]


class Finished(NamedTuple):
    """The reply is complete: the last pieces, why each choice ended, and what was used.

    `timings` are milliseconds by name, for the metrics.
    """

    attempt: int
    seq: int
    pieces: tuple[Piece, ...]
    reasons: tuple[str, ...]
    usage: Usage
    timings: dict[str, float]


class Failed(NamedTuple):
    """The reply ends with an error; `seq` and `pieces` as in `Finished`."""

    attempt: int
    seq: int
    pieces: tuple[Piece, ...]
    code: str
    message: str
    usage: Usage


class Keepalive(NamedTuple):
    """Nothing new: the attempt lives and its last token was `last_seq` (-1 for none)."""

    attempt: int
    last_seq: int


class Released(NamedTuple):
    """The attempt gives the request back through no fault of it: its worker stops."""

    attempt: int
    last_seq: int


Frame = Started | Tokens | Finished | Failed | Keepalive | Released

_pack = msgpack.Packer(autoreset=True).pack

# The hot frame, tokens without log probabilities, is written and read by a typed codec of the same
# layout in a third of the time; `tuple.__new__` is a NamedTuple's constructor without its function.
_PlainPiece = tuple[int, str, tuple[int, ...], None, None]
_pack_tokens = msgspec.msgpack.Encoder().encode
_unpack_tokens = msgspec.msgpack.Decoder(
    tuple[Literal[1], int, int, Literal["tokens"], tuple[_PlainPiece, ...]]
).decode
_new = tuple.__new__


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    raw: bytes
    match frame:
        case Tokens(attempt, seq, pieces):
            raw = _pack_tokens((WIRE_VERSION, attempt, seq, "tokens", pieces))
        case Finished(attempt, seq, pieces, reasons, usage, timings):
            used = usage.written
            raw = _pack((WIRE_VERSION, attempt, seq, "finished", pieces, reasons, used, timings))
        case Failed(attempt, seq, pieces, code, message, usage):
            used = usage.written
            raw = _pack((WIRE_VERSION, attempt, seq, "failed", pieces, code, message, used))
        case Started(attempt, worker, resume_at, shape):
            raw = _pack((WIRE_VERSION, attempt, 0, "started", worker, resume_at, shape))
        case Keepalive(attempt, last_seq):
            raw = _pack((WIRE_VERSION, attempt, last_seq, "keepalive"))
        case Released(attempt, last_seq):
            raw = _pack((WIRE_VERSION, attempt, last_seq, "released"))
    return raw


def decode_frame(data: bytes) -> Frame:
    """Read a frame. Raises BadFrame for other bytes or a newer version."""
    try:
        _, attempt, seq, _, plain = _unpack_tokens(data)
        return _new(Tokens, (attempt, seq, tuple([_new(Piece, piece) for piece in plain])))
    except msgspec.MsgspecError:
        return _decode_any(data)


def _decode_any(data: bytes) -> Frame:
    try:
        match msgpack.unpackb(data, use_list=False):
            case (1, attempt, seq, "tokens", pieces):
                return Tokens(attempt, seq, _pieces(pieces))
            case (1, attempt, seq, "finished", pieces, reasons, usage, timings):
                return Finished(
                    attempt, seq, _pieces(pieces), reasons, Usage(*usage), dict(timings)
                )
            case (1, attempt, seq, "failed", pieces, code, message, usage):
                return Failed(attempt, seq, _pieces(pieces), code, message, Usage(*usage))
            case (1, attempt, _, "started", worker, resume_at, shape):
                return Started(attempt, worker, resume_at, Shape(*shape))
            case (1, attempt, last_seq, "keepalive"):
                return Keepalive(attempt, last_seq)
            case (1, attempt, last_seq, "released"):
                return Released(attempt, last_seq)
            case _:
                raise BadFrame("no frame of this version")
    except BadFrame:
        raise
    except Exception as error:
        # msgpack and the constructors raise a dozen kinds; to a reader they are one.
        raise BadFrame(str(error) or type(error).__name__) from error


def _pieces(raw: Sequence[Sequence[Any]]) -> tuple[Piece, ...]:
    return tuple(
        Piece(choice, text, tokens, None if logprobs is None else _logprobs(logprobs), delta)
        for choice, text, tokens, logprobs, delta in raw
    )


def _logprobs(raw: Sequence[Sequence[Any]]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(text, logprob, tuple(TopToken(*token) for token in top))
        for text, logprob, top in raw
    )


def span(pieces: Sequence[Piece]) -> int:
    """Return how many seqs the pieces take: the number of their tokens."""
    return sum(len(piece.tokens) for piece in pieces)


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call that the simulated engine makes: its arguments arrive in pieces."""

    name: str
    arguments: tuple[str, ...]


class HexPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of bytes that need not be whole characters, in hexadecimal."""

    hex: str


Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=86_400_000)]
Position = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class SimHook(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a test asks of the simulated engine for one request.

    `ttft_ms` and `itl_ms` replace the time model. `pieces` are the tokens to make. `fail_at`,
    `hang_at` and `exit_at` act before token k, from 0, in every attempt. `logprobs` belong to the
    pieces one by one.
    """

    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    pieces: tuple[str | HexPiece, ...] | None = None
    fail_at: Position | None = None
    hang_at: Position | None = None
    exit_at: Position | None = None
    finish_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    logprobs: tuple[float | str, ...] | None = None


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A request on its way to a worker. `prompt` holds token ids as 32-bit little-endian words."""

    version: int = WIRE_VERSION
    request: str
    tenant: str
    model: str
    reply: str
    prompt: bytes
    sampling: Sampling
    shape: Shape
    deadline_s: float  # seconds since the epoch
    cache_salt: str | None = None
    sim: SimHook | None = None
    keep_answer: bool = False  # the frames go to `responses` once the reply has ended
    key: str | None = None  # the id of the key that it was sent with
    priority: int = 0  # as vLLM's: lower is sooner
    parsing: Parsing | None = None
    moderated: bool = True  # where the worker has a moderator

    @property
    def tokens(self) -> list[int]:
        """The prompt's token ids."""
        return unpack_tokens(self.prompt)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as 32-bit little-endian words: at most 4 bytes each, and a fast copy."""
    return _words(tokens).tobytes()


def unpack_tokens(raw: bytes) -> list[int]:
    """Return the token ids that `pack_tokens` packed."""
    return _words(raw).tolist()


def _words(content: Sequence[int] | bytes) -> "array[int]":
    words = array("I", content)
    if words.itemsize != 4:  # pragma: no cover - no platform that vLLM runs on
        raise RuntimeError("this platform has no 32-bit unsigned int")
    return words


_envelope_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


class BadEnvelope(Exception):
    """The bytes are no envelope of a version that this node reads."""


def encode_envelope(envelope: Envelope) -> bytes:
    """Return the bytes of an envelope."""
    return _envelope_encoder.encode(envelope)


def decode_envelope(data: bytes) -> Envelope:
    """Read an envelope. Raises BadEnvelope for other bytes or a newer version."""
    try:
        envelope = _envelope_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise BadEnvelope(str(error)) from error
    if envelope.version != WIRE_VERSION:
        raise BadEnvelope(f"version {envelope.version}")
    return envelope
