"""A further reader of a reply, on any streamer: from the first frame on, wherever the reply stands.

Rule: live while the request runs, from REPLIES once it has ended, from `responses` where the answer
is kept and REPLIES has forgotten it.
"""

import time

from headrace import topology
from headrace.bus import Bus
from headrace.kept import kept
from headrace.peek import Queued, find, read_queued
from schemas import subjects
from schemas.errors import Gone, NotFound
from streamer.buffer import OpenReply
from streamer.mailbox import Mailbox


async def attach(
    bus: Bus, mailbox: Mailbox, *, tenant: str, request: str, deadline_s: float | None = None
) -> OpenReply:
    """Open a tenant's reply for one more reader; `deadline_s` is the request's, where it is known.

    Raises NotFound, Gone for one that is not kept any more, BrokerAway and BrokerRefused.
    """
    reply = await mailbox.attach(tenant=tenant, request=request, deadline_s=deadline_s)
    try:
        await reply.load()
        reply.came_late(now_s=time.monotonic())
        queued = None if reply.reply.ended else await _queued(bus, tenant, request)
        if queued is not None:
            reply.model = queued.subject.model
            reply.deadline_s = queued.expires_s or reply.deadline_s
            if queued.envelope is not None:
                reply.keep(queued.envelope.shape.keep)
        elif not reply.reply.started:
            await _find_ended(bus, reply)
    except BaseException:
        await mailbox.detach(reply)
        raise
    return reply


async def _find_ended(bus: Bus, reply: OpenReply) -> None:
    """Find what is neither queued nor was in the log. Raises as `attach`."""
    await reply.load()  # it may have begun and ended between the two looks
    if reply.reply.started:
        return
    frames = await kept(bus, tenant=reply.tenant, request=reply.request)
    if frames is None:
        raise _unknown(reply.request)
    reply.give(frames)


async def _queued(bus: Bus, tenant: str, request: str) -> Queued | None:
    """Return the request's message, which it has until it ends, and which may be all it has."""
    subject = await find(bus, request)
    if subject is None or subject.tenant != tenant:
        return None
    return await read_queued(bus, subject)


def _unknown(request: str) -> NotFound | Gone:
    if time.time() - subjects.made_s(request) > topology.REPLIES_MAX_AGE_S:
        return Gone(f"The stream '{request}' is not kept any more.")
    return NotFound(f"The stream '{request}' does not exist.")
