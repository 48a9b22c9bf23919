"""`GET /v1/streams/{id}`: a client that lost its stream goes on at the next event, on any streamer.

Rule: what it gets is equal byte for byte to what it would have got. Live while the request runs,
a replay once it has ended, 410 after REPLIES has forgotten it.
"""

import time
from typing import Final

from starlette.requests import Request

from headrace import topology
from headrace.bus import BrokerAway, Bus
from headrace.peek import find
from headrace.requests import Identify, request_id, tenant_of
from schemas import subjects
from schemas.errors import BrokerUnavailable, Gone, InvalidRequest, NotFound
from streamer.mailbox import Mailbox
from streamer.relay import Relay

EVENT_ID_DIGITS_MAX: Final = 9


class Resume:
    """The route's handler."""

    def __init__(self, bus: Bus, mailbox: Mailbox, identify: Identify) -> None:
        self._bus = bus
        self._mailbox = mailbox
        self._identify = identify

    async def handle(self, request: Request) -> Relay:
        """Return the rest of a stream. Raises a Refusal."""
        tenant = await tenant_of(self._identify, request)
        name = request_id(request)
        after = _after(request)
        if not self._bus.connected:
            raise BrokerUnavailable("The log of streams cannot be reached.")
        try:
            return await self._attach(tenant, name, after)
        except BrokerAway as error:
            raise BrokerUnavailable("The log of streams cannot be reached.") from error

    async def _attach(self, tenant: str, name: str, after: int) -> Relay:
        reply = await self._mailbox.attach(tenant=tenant, request=name)
        try:
            await reply.load()
            if not reply.reply.started and not await self._waits(tenant, name):
                await reply.load()  # it may have run and ended between the two looks
                if not reply.reply.started:
                    raise _unknown(name)
        except BaseException:
            await self._mailbox.detach(reply)
            raise
        headers = {"x-request-id": name}
        return Relay(self._mailbox, reply, stream=True, headers=headers, after=after)

    async def _waits(self, tenant: str, name: str) -> bool:
        """Whether the request is in the queue, where it has no log yet."""
        subject = await find(self._bus, name)
        return subject is not None and subject.tenant == tenant


def _unknown(name: str) -> NotFound | Gone:
    if time.time() - subjects.made_s(name) > topology.REPLIES_MAX_AGE_S:
        return Gone(f"The stream '{name}' is not kept any more.")
    return NotFound(f"The stream '{name}' does not exist.")


def _after(request: Request) -> int:
    """Return the id of the last event that the client has, -1 for none. Raises InvalidRequest."""
    text = request.query_params.get("starting_after") or request.headers.get("last-event-id")
    if not text:
        return -1
    if not text.isascii() or not text.isdigit() or len(text) > EVENT_ID_DIGITS_MAX:
        raise InvalidRequest("An event id is a whole number.", param="starting_after")
    return int(text)
