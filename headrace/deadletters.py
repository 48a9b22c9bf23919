"""Requests that were given up: read, put back into the queue, or dropped.

Rule: a letter goes only after its request is in the queue again. That is a new request, with an id,
a log and a deadline of its own, so the deaths that made the letter do not count against it; nobody
waits for it, so its answer is kept for a day, for `GET /v1/streams/<new id>`.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from headrace import journal
from headrace.backlog import epoch_s
from headrace.bus import BrokerRefused, Bus, Message
from headrace.deadline import time_to_live
from headrace.dismiss import OPERATOR
from schemas import subjects
from schemas.deadletter import BadLetter, DeadLetter, PastAttempt, decode_letter
from schemas.model import PARTITIONS
from schemas.prefix import partition_of, prefix_key
from schemas.subjects import DEADLETTERS, ReplySubject, RequestSubject
from schemas.wire import BadEnvelope, Envelope, decode_envelope, encode_envelope

UNREADABLE: Final = "(unreadable)"
"""The id, tenant and model of a letter whose bytes are none."""
_BATCH: Final = 100
_NO_MESSAGE: Final = 404
_REQUEUED: Final = 2
"""The generation in the message id of a request that was put back."""


class NotRequeued(Exception):
    """A dead letter cannot be put back into the queue; the message says why."""


class Stored(NamedTuple):
    """A letter, where it is in its stream, and when it came there (seconds since the epoch)."""

    seq: int
    stored_s: float
    letter: DeadLetter

    @property
    def envelope(self) -> Envelope | None:
        """The request as it was published; None where its bytes are none."""
        try:
            return decode_envelope(self.letter.envelope)
        except BadEnvelope:
            return None

    def as_row(self, *, now_s: float) -> dict[str, Any]:
        """Return a row of `list --json`; docs/deadletters.md describes it."""
        letter = self.letter
        return {
            "id": letter.request,
            "died_at": _stamp(self.stored_s),
            "age_s": round(max(now_s - self.stored_s, 0.0), 3),
            "model": letter.model,
            "tenant": letter.tenant,
            "reason": letter.reason,
            "tokens": letter.tokens,
            "attempts": len(letter.history),
        }

    def as_json(self, *, now_s: float, prompt: bool) -> dict[str, Any]:
        """Return what `show --json` prints: the prompt's token ids only if `prompt`."""
        letter, envelope = self.letter, self.envelope
        answer = self.as_row(now_s=now_s)
        answer["attempts"] = [_attempt(each) for each in letter.history]
        if envelope is None:
            return answer | {"prompt_tokens": None, "shape": None, "sampling": None}
        answer |= {
            "prompt_tokens": len(envelope.prompt) // 4,
            "shape": envelope.shape._asdict(),
            "sampling": msgspec.to_builtins(envelope.sampling),
        }
        return answer | ({"prompt": envelope.tokens} if prompt else {})


def _attempt(past: PastAttempt) -> dict[str, Any]:
    return {
        "worker": past.worker,
        "started_at": _stamp(past.started_s),
        "ran_s": round(past.heard_s - past.started_s, 3),
        "tokens": past.tokens,
        "ended": past.ended,
    }


def _stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


async def now_s(bus: Bus) -> float:
    """Return the broker's clock, seconds since the epoch. Raises BrokerAway and BrokerRefused."""
    return epoch_s((await bus.api(f"STREAM.INFO.{DEADLETTERS}"))["ts"])


@asynccontextmanager
async def letters(
    bus: Bus, *, model: str | None = None, tenant: str | None = None
) -> AsyncIterator[AsyncIterator[Stored]]:
    """Read the letters of a tenant, to a model, or all, the oldest first, for the length of a
    block. Raises BrokerAway and BrokerRefused."""
    subject_filter = subjects.deadletters_of(model=model, tenant=tenant)
    stored = journal.walk(bus, DEADLETTERS, subject_filter, batch=_BATCH)
    async with aclosing(_read(stored)) as found:
        yield found


async def _read(messages: AsyncGenerator[Message, None]) -> AsyncGenerator[Stored, None]:
    async with aclosing(messages):
        async for message in messages:
            yield _stored(message)


def _stored(message: Message) -> Stored:
    headers = message.headers or {}
    stored_s = epoch_s(headers[journal.STORED_AT])
    try:
        letter = decode_letter(message.data)
    except BadLetter as error:
        letter = DeadLetter(
            request=UNREADABLE,
            tenant=UNREADABLE,
            model=UNREADABLE,
            reason=str(error),
            died_s=stored_s,
            tokens=0,
            envelope=b"",
        )
    return Stored(int(headers[journal.SEQUENCE]), stored_s, letter)


async def find(bus: Bus, request: str) -> list[Stored]:
    """Return a request's letters, the newest last: there may be two if its worker died while it
    wrote. Raises BrokerAway and BrokerRefused."""
    async with letters(bus) as found:
        return [each async for each in found if each.letter.request == request]


async def at(bus: Bus, seq: int) -> Stored | None:
    """Return the letter at a sequence, None where it is gone. Raises as `find`."""
    messages = journal.walk(bus, DEADLETTERS, subjects.deadletters_of(), after_seq=seq - 1, batch=1)
    async with aclosing(_read(messages)) as found:
        async for each in found:
            return each if each.seq == seq else None
    return None


async def remove(bus: Bus, seqs: Sequence[int]) -> int:
    """Delete letters; return how many were there. Raises BrokerAway and BrokerRefused."""
    removed = 0
    for seq in seqs:
        try:
            await bus.api(f"STREAM.MSG.DELETE.{DEADLETTERS}", {"seq": seq, "no_erase": True})
        except BrokerRefused as error:
            if error.status != _NO_MESSAGE:
                raise
            continue
        removed += 1
    return removed


async def requeue(bus: Bus, stored: Stored, *, timeout_s: float) -> str:
    """Put a letter's request into the queue and return its new id; the letter stays.

    Raises NotRequeued, BrokerAway and BrokerRefused.
    """
    letter = stored.letter
    envelope = stored.envelope
    if envelope is None:
        raise NotRequeued(f"the request of {letter.request} was not kept or cannot be read")
    now = time.time()
    fresh = renewed(
        envelope, request=subjects.new_request_id(now_s=now), now_s=now, timeout_s=timeout_s
    )
    headers = {
        # Of the old id: of two operators who do it at once, one succeeds.
        "Nats-Msg-Id": subjects.message_id(letter.request, _REQUEUED),
        **time_to_live(fresh.deadline_s),
    }
    subject = place_of(letter.place, fresh)
    ack = await bus.store(str(subject), encode_envelope(fresh), headers=headers)
    if ack.duplicate:
        raise NotRequeued(f"{letter.request} was requeued within the last two minutes")
    return fresh.request


def renewed(envelope: Envelope, *, request: str, now_s: float, timeout_s: float) -> Envelope:
    """Return a request as a new one that runs whether or not somebody reads its reply; pure."""
    return msgspec.structs.replace(
        envelope,
        request=request,
        reply=str(ReplySubject(OPERATOR, envelope.tenant, request)),
        shape=envelope.shape._replace(created_s=int(now_s), keep=True),
        deadline_s=now_s + timeout_s,
        keep_answer=True,  # its tenant has yet to be told of the new id
    )


def place_of(place: str, envelope: Envelope) -> RequestSubject:
    """Return the subject of a request: in the lane and partition of `place`, else by its prefix."""
    try:
        return RequestSubject.parse(place)._replace(request=envelope.request)
    except ValueError:
        key = prefix_key(
            model=envelope.model,
            adapter=None,
            tenant=envelope.tenant,
            session=None,
            tokens=envelope.tokens,
        )
        partition = partition_of(key, partitions=PARTITIONS)
        return RequestSubject(
            "online", envelope.model, partition, envelope.tenant, envelope.request
        )
