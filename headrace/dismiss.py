"""Ends requests on an operator's word, wherever they stand. Rule: who waits for the answer is told.

A request that runs hears the signal, and its worker writes the end. A request that nobody has begun
has no worker to do so: its end is written here, before it is taken out of the queue. The claim that
goes first demands an empty log, so a worker that takes the request in the meantime and this
operator cannot both begin it; a worker that comes second finds it ended.
"""

import asyncio
from contextlib import aclosing
from typing import Final

from headrace import journal
from headrace.bus import BrokerRefused, Bus, Message
from schemas import subjects
from schemas.subjects import REQUESTS, RequestSubject
from schemas.wire import (
    BadEnvelope,
    Envelope,
    Failed,
    Started,
    Usage,
    decode_envelope,
    encode_frame,
)

OPERATOR: Final = "operator"
"""The worker that the claim of such a request names."""
_CHUNK: Final = 200
_WRONG_LAST_SEQUENCE: Final = 10071


async def dismiss(bus: Bus, subject_filter: str) -> int:
    """End all queued requests under a filter; return how many were taken out of the queue.

    What is queued while this runs stays. Raises BrokerAway and BrokerRefused.
    """
    purged = 0
    chunk: list[Message] = []
    stored = journal.walk(bus, REQUESTS, subject_filter, batch=_CHUNK)
    async with aclosing(stored) as messages:
        async for message in messages:
            chunk.append(message)
            if len(chunk) == _CHUNK:
                purged += await _dismiss_chunk(bus, subject_filter, chunk)
                chunk = []
    return purged + (await _dismiss_chunk(bus, subject_filter, chunk) if chunk else 0)


async def _dismiss_chunk(bus: Bus, subject_filter: str, chunk: list[Message]) -> int:
    await asyncio.gather(*[_tell_reader(bus, message.data) for message in chunk])
    last_seq = int((chunk[-1].headers or {})[journal.SEQUENCE])
    body = {"filter": subject_filter, "seq": last_seq + 1}
    answer = await bus.api(f"STREAM.PURGE.{REQUESTS}", body)
    for message in chunk:
        await _signal(bus, (message.headers or {})[journal.SUBJECT])
    return int(answer["purged"])


async def _signal(bus: Bus, text: str) -> None:
    """Tell the workers; those that do not hold the request remember it for a while."""
    try:
        subject = RequestSubject.parse(text)
    except ValueError:
        return  # foreign: no worker has it
    await bus.publish(subjects.cancel_signal(subject.tenant, subject.request), b"")


async def _tell_reader(bus: Bus, data: bytes) -> None:
    """Write the end of a request that nobody has begun."""
    try:
        envelope = decode_envelope(data)
    except BadEnvelope:
        return  # nothing says who waits for it
    claim = Started(0, OPERATOR, 0, envelope.shape)
    headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
    try:
        stored = await bus.store(envelope.reply, encode_frame(claim), headers=headers)
    except BrokerRefused as error:
        if error.code == _WRONG_LAST_SEQUENCE:
            return  # it has begun: its worker hears the signal
        raise
    await bus.store(envelope.reply, encode_frame(_end(envelope, attempt=stored.seq)))


def _end(envelope: Envelope, *, attempt: int) -> Failed:
    usage = Usage(len(envelope.prompt) // 4, 0, 0)
    return Failed(attempt, 0, (), "request_cancelled", "An operator cancelled the request.", usage)
