"""Who else reads a reply. Rule: a request is cancelled when its last reader leaves, not before.

One reader came with the request: the streamer in the reply's subject has it, and answers for it on
a subject of its own. Those that were attached later may be on any streamer; each listens on the
reply's subject for readers. Nothing is subscribed for a request that has one reader.
"""

from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.peek import find, read_queued
from schemas import subjects
from schemas.subjects import ReplySubject

ANSWER_S: Final = 2.0
"""Who is gone is known at once: nobody listens, or says no. Only of a streamer that stands still is
there no word, and its readers must not lose their request for a stall."""
HERE = b"here"


async def is_attached(bus: Bus, *, tenant: str, request: str) -> bool:
    """Tell whether anybody was attached to a reply, on any streamer, and is there still."""
    return await _answers(bus, subjects.readers_of(tenant=tenant, request=request), b"")


async def is_read_at(bus: Bus, streamer: str, *, request: str) -> bool:
    """Tell whether the reader that came with the request is at this streamer still."""
    return await _answers(bus, subjects.streamer_reads(streamer), request.encode())


async def streamer_of(bus: Bus, request: str) -> str | None:
    """Return the streamer of a request that waits in the queue; None where it does not."""
    try:
        subject = await find(bus, request)
        queued = None if subject is None else await read_queued(bus, subject)
    except (BrokerAway, BrokerRefused):
        return None
    if queued is None or queued.envelope is None:
        return None
    return ReplySubject.parse(queued.envelope.reply).streamer


async def _answers(bus: Bus, subject: str, question: bytes) -> bool:
    try:
        return await bus.request(subject, question, timeout_s=ANSWER_S) == HERE
    except BrokerAway:
        return False
