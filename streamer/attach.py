"""A further reader of a reply, on any streamer: from the first frame on, wherever the reply stands.

Rule: live while the request runs, from REPLIES once it has ended, from `responses` where the answer
is kept and REPLIES has forgotten it.
"""

import time

from headrace import topology
from headrace.bus import Bus
from headrace.kept import kept
from headrace.peek import find
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
        if not reply.reply.started and not await _waits(bus, tenant, request):
            frames = await kept(bus, tenant=tenant, request=request)
            if frames is None:
                raise _unknown(request)
            reply.give(frames)
    except BaseException:
        await mailbox.detach(reply)
        raise
    return reply


async def _waits(bus: Bus, tenant: str, request: str) -> bool:
    """Whether the request is in the queue, where it has no log yet."""
    subject = await find(bus, request)
    return subject is not None and subject.tenant == tenant


def _unknown(request: str) -> NotFound | Gone:
    if time.time() - subjects.made_s(request) > topology.REPLIES_MAX_AGE_S:
        return Gone(f"The stream '{request}' is not kept any more.")
    return NotFound(f"The stream '{request}' does not exist.")
