"""Where one request stands, in the queue and in its reply. Rule: the prompt stays where it is."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

import msgspec

from headrace import journal, survey
from headrace.backlog import epoch_s
from headrace.bus import BrokerRefused, Bus
from schemas import subjects
from schemas.subjects import REQUESTS, ReplySubject, RequestSubject
from schemas.wire import (
    BadEnvelope,
    BadFrame,
    Envelope,
    Failed,
    Finished,
    Frame,
    Started,
    Tokens,
    decode_envelope,
    decode_frame,
    span,
)

_NO_CONSUMER: Final = 10014
_UNKNOWN: Final = 2**63
"""The beginning of an attempt whose worker has yet to read the log: nothing lies beyond it."""

State = Literal["waiting", "running", "ended", "gone"]


class Queued(NamedTuple):
    """A request's message in the queue; `envelope` is None when its bytes are none."""

    subject: RequestSubject
    seq: int
    stored_s: float
    ttl_s: float | None
    envelope: Envelope | None

    @property
    def expires_s(self) -> float | None:
        """When the request's time is over, in seconds since the epoch."""
        if self.envelope is not None:
            return self.envelope.deadline_s
        return None if self.ttl_s is None else self.stored_s + self.ttl_s


class Delivery(NamedTuple):
    """How often a request was delivered: `times`, or more where that is not `exact`.

    The broker tells by partition how many requests were delivered more than once, not which.
    """

    times: int
    exact: bool


class Progress(NamedTuple):
    """What the log holds of a request's reply.

    `claims` counts how often it was taken up: by workers that ran it, by the one that gave it up
    or wrote its end, by an operator who ended it.
    """

    streamer: str
    tenant: str
    claims: int
    tokens: int
    worker: str | None
    ended: Literal["finished", "failed"] | None
    code: str | None


class Peek(NamedTuple):
    """All that is known of one request."""

    request: str
    at_s: float
    queued: Queued | None
    delivery: Delivery
    progress: Progress | None

    @property
    def state(self) -> State:
        """Where the request stands; `gone` has begun, has not ended, and is no longer queued."""
        if self.queued is not None:
            return "running" if self.delivery.times else "waiting"
        return "ended" if self.progress is not None and self.progress.ended else "gone"

    def as_json(self, *, prompt: bool) -> dict[str, Any]:
        """Return what `--json` prints; docs/backlog.md describes it."""
        answer: dict[str, Any] = {"id": self.request, "state": self.state}
        if self.queued is not None:
            subject, expires_s = self.queued.subject, self.queued.expires_s
            answer |= {
                "lane": subject.lane,
                "model": subject.model,
                "partition": str(subject.partition),
                "tenant": subject.tenant,
                "age_s": round(max(self.at_s - self.queued.stored_s, 0.0), 3),
                "expires_in_s": None if expires_s is None else round(expires_s - self.at_s, 3),
                "deliveries": self.delivery.times,
                "deliveries_exact": self.delivery.exact,
            }
            if self.queued.envelope is not None:
                tokens = self.queued.envelope.tokens
                answer["prompt_tokens"] = len(tokens)
                if prompt:
                    answer["prompt"] = tokens
        return answer | {"reply": None if self.progress is None else self.progress._asdict()}


async def peek(bus: Bus, request: str) -> Peek | None:
    """Look at a request; None if nothing knows it. Raises BrokerAway and BrokerRefused."""
    subject = await find(bus, request)
    queued = None if subject is None else await read_queued(bus, subject)
    progress = await progress_in(bus, subjects.replies_to(request))
    if queued is None and progress is None:
        return None
    delivery = Delivery(0, True)
    if queued is not None:
        claims = 0 if progress is None else progress.claims
        consumer = await _consumer(bus, queued.subject)
        delivery = delivery_of(queued.seq, consumer, claims=claims)
    at_s = (await survey.mark(bus)).at_s
    return Peek(request, at_s, queued, delivery, progress)


async def progress_in(bus: Bus, reply: str) -> Progress | None:
    """Sum up the log under a reply's subject or filter; None if it is empty. Raises as `peek`."""
    entries = await journal.read(bus, subjects.REPLIES, reply)
    return progress_of(entries[0].subject, _frames(entries)) if entries else None


async def find(bus: Bus, request: str) -> RequestSubject | None:
    """Return the subject of a queued request, whoever's it is. Raises as `peek`."""
    query = {"subjects_filter": subjects.requests_of(request=request)}
    info = await bus.api(f"STREAM.INFO.{REQUESTS}", query)
    for subject in info["state"].get("subjects") or ():
        with suppress(ValueError):  # foreign
            return RequestSubject.parse(subject)
    return None


async def read_queued(bus: Bus, subject: RequestSubject) -> Queued | None:
    """Return a request's message; None when it has left. Raises BrokerAway and BrokerRefused."""
    async for message in journal.walk(bus, REQUESTS, str(subject)):
        return queued_of(message.headers or {}, message.data)
    return None


def queued_of(headers: Mapping[str, str], data: bytes) -> Queued:
    """Read a stored request. Raises ValueError for a foreign subject."""
    try:
        envelope = decode_envelope(data)
    except BadEnvelope:
        envelope = None
    ttl = headers.get("Nats-TTL", "")
    return Queued(
        RequestSubject.parse(headers[journal.SUBJECT]),
        int(headers[journal.SEQUENCE]),
        epoch_s(headers[journal.STORED_AT]),
        float(ttl) if ttl.isdecimal() else None,
        envelope,
    )


def delivery_of(seq: int, consumer: Mapping[str, Any] | None, *, claims: int) -> Delivery:
    """Tell how often the message at `seq` was delivered, by its consumer's info and its claims.

    Each claim in the log was a delivery. Without a consumer nobody was ever given it.
    """
    if consumer is None or seq > consumer["delivered"]["stream_seq"]:
        return Delivery(0, True)
    redelivered, running = consumer["num_redelivered"], consumer["num_ack_pending"]
    if not redelivered:
        return Delivery(1, True)
    return Delivery(max(claims, 2 if redelivered >= running else 1), False)


def progress_of(subject: str, frames: Iterable[tuple[int, Frame]]) -> Progress:
    """Sum up a reply's frames, each with its sequence in the log; what an attempt said beyond the
    beginning of a later one is no part of the reply."""
    reply = ReplySubject.parse(subject)
    begins: dict[int, int] = {}
    parts: list[tuple[int, int, Tokens | Finished | Failed]] = []
    worker = None
    for stored, frame in frames:
        match frame:
            case Started(attempt, name, resume_at):
                # The log numbers a claim; what its holder says again of it bears that number.
                number, worker = attempt or stored, name
                if resume_at is None:
                    begins.setdefault(number, _UNKNOWN)
                else:
                    begins[number] = min(resume_at, begins.get(number, _UNKNOWN))
            case (
                Tokens(attempt, seq, pieces)
                | Finished(attempt, seq, pieces)
                | Failed(attempt, seq, pieces)
            ):
                parts.append((attempt, seq + span(pieces), frame))
    tokens = 0
    ended: Literal["finished", "failed"] | None = None
    code = None
    for attempt, end, frame in parts:
        bound = min((seq for other, seq in begins.items() if other > attempt), default=_UNKNOWN)
        tokens = max(tokens, min(end, bound))
        if bound <= end or isinstance(frame, Tokens):
            continue
        ended = "finished" if isinstance(frame, Finished) else "failed"
        code = frame.code if isinstance(frame, Failed) else None
    return Progress(reply.streamer, reply.tenant, len(begins), tokens, worker, ended, code)


def lines(found: Peek, *, prompt: bool) -> list[str]:
    """Return what is known of a request as lines of text."""
    answer = found.as_json(prompt=prompt)
    reply = answer.pop("reply")
    if reply is not None:
        answer |= {f"reply {name}": value for name, value in reply.items()}
    if not answer.pop("deliveries_exact", True):
        answer["deliveries"] = f"{answer['deliveries']} or more"
    return [f"{name:<16} {_shown(value)}" for name, value in answer.items()]


def _shown(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _frames(entries: Iterable[journal.Entry]) -> Iterable[tuple[int, Frame]]:
    for entry in entries:
        try:
            yield entry.seq, decode_frame(entry.data)
        except BadFrame:
            continue


async def _consumer(bus: Bus, subject: RequestSubject) -> dict[str, Any] | None:
    name = subjects.consumer_name(subject.lane, subject.model, subject.partition)
    try:
        return await bus.api(f"CONSUMER.INFO.{REQUESTS}.{name}")
    except BrokerRefused as error:
        if error.code != _NO_CONSUMER:
            raise
        return None
