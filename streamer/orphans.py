"""Replies that nobody will end: their requests are in the queue no more. Rule: a client is told.

A request stays in REQUESTS until its end is in the log. One that is in neither was lost with its
stream, or purged by hand: nobody has it, however long its client waits. (Before that it waits in
ingress for its turn, where nothing is lost but with its client.) A worker says each few
seconds that it lives, so only replies of which nothing was heard are looked for; all of them once
the queue was made anew, after the workers had time to put back what they run.
"""

import asyncio
import logging
import math
import time
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from schemas import subjects
from schemas.errors import BrokerUnavailable, WorkerLost
from streamer.buffer import OpenReply
from streamer.mailbox import Mailbox

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
QUIET_S: Final = 20.0
HEARD_S: Final = 6.0
"""A worker is silent for no longer about what it runs."""
PUT_BACK_S: Final = 3.0
ABSENCES_MAX: Final = 3
"""Looks that find nothing before it is believed: the log may be a moment behind the queue."""
LOOKS_MAX: Final = 200


class Orphans:
    """Finds the orphans among a mailbox's replies; run `watch` as a task."""

    def __init__(self, bus: Bus, mailbox: Mailbox) -> None:
        self._bus = bus
        self._mailbox = mailbox
        self._all_from_s = math.inf

    async def queue_remade(self) -> None:
        """Note that the queue was made anew."""
        self._all_from_s = time.monotonic() + PUT_BACK_S

    async def watch(self) -> None:
        """Look each second; for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._bus.ready:
                await self._look(now_s=time.monotonic())

    async def _look(self, *, now_s: float) -> None:
        if now_s > self._all_from_s:
            self._all_from_s = math.inf
            for reply in self._mailbox.replies:
                reply.asked_s = -math.inf
        replies = [each for each in self._mailbox.replies if each.queued and each.waits]
        due = [each for each in replies if _is_due(each, now_s=now_s)]
        for reply in due[:LOOKS_MAX]:
            reply.asked_s = now_s
            try:
                await self._look_for(reply)
            except (BrokerAway, BrokerRefused) as error:
                log.debug("%s was not looked for: %s", reply.request, error)
                return

    async def _look_for(self, reply: OpenReply) -> None:
        subject = subjects.requests_of(tenant=reply.tenant, request=reply.request)
        # Of the leader: a follower that answers direct gets may lag.
        info = await self._bus.api(f"STREAM.INFO.{subjects.REQUESTS}", {"subjects_filter": subject})
        if info["state"].get("subjects"):
            reply.absences = 0
            return
        reply.absences += 1
        if reply.absences < ABSENCES_MAX:
            reply.look_at_log()
            return
        log.warning("%s is in the queue no more and has no end: given up", reply.request)
        if reply.reply.started:
            reply.refuse(
                WorkerLost("The request is lost: its worker is gone, and the queue's copy.")
            )
        else:
            reply.refuse(BrokerUnavailable("The queue has lost this request; send it again."))


def _is_due(reply: OpenReply, *, now_s: float) -> bool:
    quiet_s = reply.quiet_s(now_s=now_s)
    if reply.reply.started and quiet_s < HEARD_S:
        reply.absences = 0
        return False
    if reply.absences or reply.asked_s == -math.inf:
        return True
    return quiet_s > QUIET_S and now_s - reply.asked_s > QUIET_S
