"""Where redirected clients come with their tickets. Rule: a ticket is used once, here only.

A request that began but whose client did not follow its redirect within `CLAIM_S` is cancelled.
"""

import logging
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.cancel import cancel
from headrace.ticket import TICKET_S, Ticket, Tickets
from schemas.errors import Gone
from schemas.subjects import ReplySubject
from schemas.wire import BadFrame, Failed, Finished, Started, decode_frame

log = logging.getLogger(__name__)

CLAIM_S: Final = 5.0


class Desk:
    """Knows which tickets were used, and which replies nobody came for."""

    def __init__(self, bus: Bus, tickets: Tickets, streamer: str) -> None:
        self._bus = bus
        self._tickets = tickets
        self._streamer = streamer
        self._used: dict[str, float] = {}
        self._unclaimed: dict[str, tuple[str, float]] = {}

    def claim(self, text: str, *, now_s: float) -> Ticket:
        """Take a ticket; `now_s` is the epoch's. Raises Forbidden or Gone."""
        ticket = self._tickets.read(text, now_s=now_s)
        if ticket.streamer != self._streamer:
            raise Gone("The streamer of this ticket is gone.")
        if ticket.request in self._used:
            raise Gone("This ticket has been used.")
        self._used[ticket.request] = ticket.expires_s
        self._unclaimed.pop(ticket.request, None)
        return ticket

    def unexpected(self, subject: str, data: bytes, *, now_s: float) -> None:
        """Note a frame that no client waits for here."""
        request = subject.rpartition(".")[2]
        if request in self._used:
            return
        try:
            frame = decode_frame(data)
        except BadFrame:
            return
        match frame:
            case Started():
                self._unclaimed.setdefault(request, (subject, now_s + CLAIM_S))
            case Finished() | Failed():
                self._unclaimed.pop(request, None)

    async def tick(self, *, now_s: float) -> None:
        """Cancel what nobody came for, and forget old tickets."""
        for request, expires_s in list(self._used.items()):
            if now_s > expires_s + TICKET_S:
                del self._used[request]
        late = [
            (request, subject)
            for request, (subject, until_s) in self._unclaimed.items()
            if now_s > until_s
        ]
        for request, subject in late:
            del self._unclaimed[request]
            log.info("%s: nobody came for the answer; cancelled", request)
            tenant = ReplySubject.parse(subject).tenant
            try:
                await cancel(self._bus, tenant=tenant, request=request)
            except (BrokerAway, BrokerRefused) as error:
                log.warning("%s could not be cancelled: %s", request, error)
