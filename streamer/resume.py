"""`GET /v1/streams/{id}`: a client that lost its stream goes on at the next event, on any streamer.

Rule: what it gets is equal byte for byte to what it would have got. Live while the request runs,
a replay once it has ended, 410 after REPLIES has forgotten it, or, where the answer is kept, after
that is gone too.
"""

from typing import Final

from starlette.requests import Request

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.requests import Identify, request_id, tenant_of
from schemas.errors import BrokerUnavailable, InvalidRequest
from streamer.attach import attach
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
        except (BrokerAway, BrokerRefused) as error:
            raise BrokerUnavailable("The log of streams cannot be reached.") from error

    async def _attach(self, tenant: str, name: str, after: int) -> Relay:
        reply = await attach(self._bus, self._mailbox, tenant=tenant, request=name)
        headers = {"x-request-id": name}
        return Relay(self._mailbox, reply, stream=True, headers=headers, after=after)


def _after(request: Request) -> int:
    """Return the id of the last event that the client has, -1 for none. Raises InvalidRequest."""
    text = request.query_params.get("starting_after") or request.headers.get("last-event-id")
    if not text:
        return -1
    if not text.isascii() or not text.isdigit() or len(text) > EVENT_ID_DIGITS_MAX:
        raise InvalidRequest("An event id is a whole number.", param="starting_after")
    return int(text)
