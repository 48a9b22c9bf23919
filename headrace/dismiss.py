"""Ends requests on an operator's word, wherever they stand. Rule: who waits for the answer is told.

A request that runs hears the signal, and its worker writes the end. Where no worker does, because
nobody has begun or because the worker is dead, the end is written here, after a claim that fences
off every earlier attempt. The first claim demands an empty log, so that this operator and a worker
that takes the request in the meantime cannot both begin it; a worker that comes second finds it
ended.
"""

import asyncio
import contextlib
import time
from contextlib import aclosing
from typing import Final, NamedTuple

from headrace import journal
from headrace.bus import BrokerRefused, Bus, Message
from headrace.peek import Progress, progress_in
from headrace.settle import settle
from schemas import subjects
from schemas.subjects import (
    REPLIES,
    REQUESTS,
    ReplySubject,
    RequestSubject,
    Settlement,
    requests_of,
)
from schemas.wire import (
    BadEnvelope,
    BadFrame,
    Failed,
    Finished,
    Shape,
    Started,
    Usage,
    decode_envelope,
    decode_frame,
    encode_frame,
)

OPERATOR: Final = "operator"
"""The worker that such a claim names."""
WORKER_S: Final = 1.5
"""How long a worker may take to write the end; a living one needs less than a second."""
_LOOK_S: Final = 0.1
_CHUNK: Final = 200
_WRONG_LAST_SEQUENCE: Final = 10071


class Waiting(NamedTuple):
    """Who waits for an answer: the subject it is read from, and what an end must say."""

    reply: str
    shape: Shape
    prompt_tokens: int


async def dismiss(bus: Bus, subject_filter: str) -> int:
    """End all queued requests under a filter; return how many were taken out of the queue.

    What is queued while this runs stays. Raises BrokerAway and BrokerRefused.
    """
    purged = 0
    begun: list[Waiting] = []
    chunk: list[Message] = []
    stored = journal.walk(bus, REQUESTS, subject_filter, batch=_CHUNK)
    async with aclosing(stored) as messages:
        async for message in messages:
            chunk.append(message)
            if len(chunk) == _CHUNK:
                purged += await _dismiss_chunk(bus, subject_filter, chunk, begun)
                chunk = []
    if chunk:
        purged += await _dismiss_chunk(bus, subject_filter, chunk, begun)
    await _end_what_no_worker_ends(bus, begun)
    return purged


async def dismiss_key(bus: Bus, *, tenant: str, key: str | None) -> int:
    """End the requests that were sent with a key, or all of a tenant's; return how many.

    Raises BrokerAway and BrokerRefused.
    """
    subject_filter = requests_of(tenant=tenant)
    if key is None:
        return await dismiss(bus, subject_filter)
    found = []
    async with aclosing(journal.walk(bus, REQUESTS, subject_filter, batch=_CHUNK)) as messages:
        async for message in messages:
            with contextlib.suppress(BadEnvelope):
                if decode_envelope(message.data).key == key:
                    found.append((message.headers or {})[journal.SUBJECT])
    ended = 0
    for start in range(0, len(found), _CHUNK):
        chunk = found[start : start + _CHUNK]
        ended += sum(await asyncio.gather(*[dismiss(bus, subject) for subject in chunk]))
    return ended


async def _dismiss_chunk(
    bus: Bus, subject_filter: str, chunk: list[Message], begun: list[Waiting]
) -> int:
    """Take a chunk out of the queue; add those that have begun to `begun`."""
    waiting = [found for message in chunk if (found := _waiting(message.data)) is not None]
    ended = await asyncio.gather(*[_end_unbegun(bus, each) for each in waiting])
    begun += [each for each, done in zip(waiting, ended, strict=True) if not done]
    last_seq = int((chunk[-1].headers or {})[journal.SEQUENCE])
    body = {"filter": subject_filter, "seq": last_seq + 1}
    answer = await bus.api(f"STREAM.PURGE.{REQUESTS}", body)
    for message in chunk:
        await _signal(bus, (message.headers or {})[journal.SUBJECT])
    return int(answer["purged"])


def _waiting(data: bytes) -> Waiting | None:
    try:
        envelope = decode_envelope(data)
    except BadEnvelope:
        return None  # nothing says who waits for it
    return Waiting(envelope.reply, envelope.shape, len(envelope.prompt) // 4)


async def _signal(bus: Bus, text: str) -> None:
    """Tell the workers; those that do not hold the request remember it for a while."""
    try:
        subject = RequestSubject.parse(text)
    except ValueError:
        return  # foreign: no worker has it
    await bus.publish(subjects.cancel_signal(subject.tenant, subject.request), b"")


async def _end_unbegun(bus: Bus, waiting: Waiting) -> bool:
    """Write the end of a request unless its log holds something; return whether it was written."""
    try:
        await _write_end(bus, waiting, tokens=0, first=True)
    except BrokerRefused as error:
        if error.code != _WRONG_LAST_SEQUENCE:
            raise
        return False
    return True


async def _end_what_no_worker_ends(bus: Bus, begun: list[Waiting]) -> None:
    """Give workers their time, then write the ends that are missing."""
    give_up_s = time.monotonic() + WORKER_S
    while begun and time.monotonic() < give_up_s:
        await asyncio.sleep(_LOOK_S)
        begun = [each for each in begun if not await _has_ended(bus, each)]
    for each in begun:
        progress: Progress | None = await progress_in(bus, each.reply)
        if progress is None or not progress.ended:
            await _write_end(bus, each, tokens=0 if progress is None else progress.tokens)


async def _has_ended(bus: Bus, waiting: Waiting) -> bool:
    """Tell whether the last frame of a reply is its terminal one, and its attempt has not lost the
    request to another before."""
    data = await bus.request(f"$JS.API.DIRECT.GET.{REPLIES}.{waiting.reply}", b"", timeout_s=5.0)
    try:
        if not isinstance(decode_frame(data), Finished | Failed):
            return False
    except BadFrame:
        return False
    progress = await progress_in(bus, waiting.reply)
    return progress is not None and progress.ended is not None


async def _write_end(bus: Bus, waiting: Waiting, *, tokens: int, first: bool = False) -> None:
    """Claim the request for no worker, and say that it was cancelled after so many tokens."""
    claim = Started(0, OPERATOR, tokens, waiting.shape)
    headers = {"Nats-Expected-Last-Subject-Sequence": "0"} if first else None
    attempt = (await bus.store(waiting.reply, encode_frame(claim), headers=headers)).seq
    usage = Usage(waiting.prompt_tokens, tokens, 0)
    message = "An operator cancelled the request."
    end = Failed(attempt, tokens, (), "request_cancelled", message, usage)
    await bus.store(waiting.reply, encode_frame(end))
    whose = ReplySubject.parse(waiting.reply)
    await settle(
        bus,
        Settlement(
            whose.tenant,
            whose.request,
            waiting.shape.model,
            None if first else waiting.prompt_tokens,
            tokens,
        ),
    )
