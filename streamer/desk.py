"""Where redirected clients come with their tickets. Rule: a ticket is used once, here only;
an EventSource's, which comes back with it by itself, as often as it lives, and everywhere.

A request that began but whose client did not follow its redirect within `CLAIM_S` is cancelled,
unless somebody else reads it.
"""

import logging
import math
from dataclasses import dataclass
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.cancel import cancel_surely
from headrace.ticket import TICKET_S, Ticket, Tickets
from schemas.errors import Gone
from schemas.subjects import ReplySubject
from schemas.wire import (
    BadFrame,
    Failed,
    Finished,
    Keepalive,
    Started,
    Tokens,
    decode_frame,
    span,
)
from streamer import readers

log = logging.getLogger(__name__)

CLAIM_S: Final = 5.0
REMEMBER_S: Final = 2 * TICKET_S
"""Longer than any ticket lives."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A ticket that was taken, and the last seq that was heard of its reply; -1 for nothing."""

    ticket: Ticket
    heard_seq: int


@dataclass(slots=True)
class _Unclaimed:
    """A reply that has begun and whose client has not come; times are the epoch's."""

    subject: str
    cancel_at_s: float
    forget_at_s: float
    last_seq: int = -1


class Desk:
    """Knows which tickets were used, and which replies nobody came for."""

    def __init__(self, bus: Bus, tickets: Tickets, streamer: str) -> None:
        self._bus = bus
        self._tickets = tickets
        self._streamer = streamer
        self._spent: dict[str, tuple[str, float]] = {}
        self._unclaimed: dict[str, _Unclaimed] = {}

    @property
    def waiting(self) -> int:
        """How many replies run whose client has not come yet."""
        return sum(found.cancel_at_s < math.inf for found in self._unclaimed.values())

    def claim(self, text: str, *, now_s: float) -> Claim:
        """Take a ticket; `now_s` is the epoch's. Raises Forbidden or Gone."""
        ticket = self._tickets.read(text, now_s=now_s)
        if ticket.returns:
            return Claim(ticket, -1)
        if ticket.streamer != self._streamer:
            raise Gone("The streamer of this ticket is gone.")
        # There may be many tickets to attach to one request, and one that came with it.
        use = ticket.attach or ticket.request
        if use in self._spent:
            raise Gone(self._spent[use][0])
        self._spend(use, "This ticket has been used.", now_s=now_s)
        found = None if ticket.attach else self._unclaimed.pop(ticket.request, None)
        return Claim(ticket, -1 if found is None else found.last_seq)

    def awaits(self, request: str) -> bool:
        """Tell whether a request runs whose client has not come yet."""
        found = self._unclaimed.get(request)
        return found is not None and found.cancel_at_s < math.inf

    def _spend(self, use: str, reason: str, *, now_s: float) -> None:
        self._spent[use] = (reason, now_s + REMEMBER_S)

    def unexpected(self, subject: str, data: bytes, *, now_s: float) -> None:
        """Note a frame that no client waits for here."""
        request = subject.rpartition(".")[2]
        if request in self._spent:
            return
        try:
            frame = decode_frame(data)
        except BadFrame:
            return
        if isinstance(frame, Started) and request not in self._unclaimed:
            cancel_at_s = math.inf if frame.shape.keep else now_s + CLAIM_S
            self._unclaimed[request] = _Unclaimed(subject, cancel_at_s, now_s + REMEMBER_S)
        found = self._unclaimed.get(request)
        if found is None:
            return
        match frame:
            case Tokens(_, seq, pieces):
                found.last_seq = max(found.last_seq, seq + span(pieces) - 1)
            case Keepalive(_, last_seq):
                found.last_seq = max(found.last_seq, last_seq)
            case Finished(_, seq, pieces) | Failed(_, seq, pieces):
                found.last_seq = max(found.last_seq, seq + span(pieces))
                found.cancel_at_s = math.inf

    async def tick(self, *, now_s: float) -> None:
        """Cancel what nobody came for, and forget what no ticket can name any more."""
        for request in [name for name, (_, until_s) in self._spent.items() if now_s > until_s]:
            del self._spent[request]
        for request, found in list(self._unclaimed.items()):
            if now_s > found.cancel_at_s:
                await self._cancel(request, found, now_s=now_s)
            elif now_s > found.forget_at_s:
                self._unclaimed.pop(request, None)

    async def close(self, *, now_s: float) -> None:
        """Cancel all that nobody came for: this streamer ends, and its tickets with it."""
        for request, found in list(self._unclaimed.items()):
            if found.cancel_at_s < math.inf:
                await self._cancel(request, found, now_s=now_s)

    async def _cancel(self, request: str, found: _Unclaimed, *, now_s: float) -> None:
        tenant = ReplySubject.parse(found.subject).tenant
        if await readers.is_attached(self._bus, tenant=tenant, request=request):
            found.cancel_at_s = now_s + CLAIM_S  # that reader may leave before the end
            return
        if self._unclaimed.pop(request, None) is None:
            return  # its client came while another one was cancelled
        self._spend(request, "Nobody came for this answer, so it was cancelled.", now_s=now_s)
        log.info("%s: nobody came for the answer; cancelled", request)
        try:
            await cancel_surely(self._bus, tenant=tenant, request=request)
        except (BrokerAway, BrokerRefused) as error:
            log.info("%s is cancelled when the broker is back: %s", request, error)
