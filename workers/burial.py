"""Makes a dead letter of a request that has killed too often. Rule: what happened is read from the
log, as the broker stored it, and told whole; the prompt stays inside the envelope.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec

from headrace import journal
from headrace.backlog import epoch_s
from headrace.bus import Bus
from schemas import subjects
from schemas.deadletter import DeadLetter, PastAttempt, encode_letter
from schemas.wire import (
    BadFrame,
    Envelope,
    Failed,
    Finished,
    Frame,
    Started,
    Tokens,
    decode_frame,
    encode_envelope,
    span,
)
from workers.history import Fate, attempt_of, fates

_HEADER_BYTES: Final = 256

Heard = tuple[int, float, Frame]
"""A frame, with its sequence in the log and when it was stored (seconds since the epoch)."""


async def bury(
    bus: Bus, envelope: Envelope, *, place: str, reason: str, tokens: int, attempt: int
) -> None:
    """Store a dead letter; `attempt` is the writer's own, which is no part of the history.

    Two workers that bury one request within two minutes leave one letter. A letter over the
    broker's payload limit is stored without its envelope. Raises BrokerAway and BrokerRefused.
    """
    letter = DeadLetter(
        request=envelope.request,
        tenant=envelope.tenant,
        model=envelope.model,
        reason=reason,
        died_s=time.time(),
        tokens=tokens,
        envelope=encode_envelope(envelope),
        place=place,
        history=history_of(await _read(bus, envelope.reply), attempt=attempt),
    )
    subject = subjects.deadletters_of(model=envelope.model, tenant=envelope.tenant)
    if len(encode_letter(letter)) + _HEADER_BYTES > bus.payload_bytes_max:
        # A prompt at the limit: without this it would come back, unburied, until its deadline.
        letter = msgspec.structs.replace(letter, envelope=b"")
    once = {"Nats-Msg-Id": envelope.request}
    await bus.store(subject, encode_letter(letter), headers=once)


async def _read(bus: Bus, reply: str) -> list[Heard]:
    heard: list[Heard] = []
    async with aclosing(journal.walk(bus, subjects.REPLIES, reply)) as messages:
        async for message in messages:
            headers: Mapping[str, str] = message.headers or {}
            try:
                frame = decode_frame(message.data)
            except BadFrame:
                continue
            stored_s = epoch_s(headers[journal.STORED_AT])
            heard.append((int(headers[journal.SEQUENCE]), stored_s, frame))
    return heard


def history_of(heard: Iterable[Heard], *, attempt: int) -> tuple[PastAttempt, ...]:
    """Return how the attempts before `attempt` went, in the order of their beginnings; pure."""
    past = [each for each in heard if attempt_of(each[0], each[2]) != attempt]
    began: dict[int, tuple[str, float]] = {}
    last: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for stored, stored_s, frame in past:
        number = attempt_of(stored, frame)
        last[number] = stored_s
        match frame:
            case Started(_, worker, resume_at):
                began.setdefault(number, (worker, stored_s))
                tokens[number] = max(tokens.get(number, 0), resume_at or 0)
            case Tokens(_, seq, pieces) | Finished(_, seq, pieces) | Failed(_, seq, pieces):
                tokens[number] = max(tokens.get(number, 0), seq + span(pieces))
            case _:
                continue
    ends: Mapping[int, Fate] = fates((stored, frame) for stored, _, frame in past)
    return tuple(
        PastAttempt(
            worker=began[number][0],
            started_s=began[number][1],
            heard_s=last[number],
            tokens=tokens[number],
            ended=fate.value,
        )
        for number, fate in ends.items()
    )
