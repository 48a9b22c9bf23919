"""`GET /v1/streams/{id}`: a client that lost its stream goes on at the next event, on any streamer.

Rule: what it gets is equal byte for byte to what it would have got. Live while the request runs,
a replay once it has ended, 410 after REPLIES has forgotten it, or, where the answer is kept, after
that is gone too.

A browser's EventSource asks again by itself, after a stream's end as after a connection's loss, and
gives up at every status but 200 (WHATWG HTML, section 9.2). So it is told first how long to wait, a
refusal that time heals comes as an error event, and who has seen the end is answered with 204.
"""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.requests import Identify, request_id, tenant_of
from schemas.errors import BrokerUnavailable, InvalidRequest, Refusal
from schemas.subjects import new_request_id
from streamer.attach import attach
from streamer.mailbox import Mailbox
from streamer.relay import Relay
from streamer.sse import RETRY, error_event

EVENT_ID_DIGITS_MAX: Final = 9


class Resume:
    """The route's handler."""

    def __init__(self, bus: Bus, mailbox: Mailbox, identify: Identify) -> None:
        self._bus = bus
        self._mailbox = mailbox
        self._identify = identify

    async def handle(self, request: Request) -> Relay | Response:
        """Return the rest of a stream. Raises a Refusal."""
        if not _is_event_source(request):
            return await self._rest(request, returns=False)
        try:
            return await self._rest(request, returns=True)
        except Refusal as refusal:
            if not refusal.retryable:
                raise
            return _come_again(refusal)

    async def _rest(self, request: Request, *, returns: bool) -> Relay:
        tenant = await tenant_of(self._identify, request)
        name = request_id(request)
        after = _after(request)
        if not self._bus.connected:
            raise BrokerUnavailable("The log of streams cannot be reached.")
        try:
            reply = await attach(self._bus, self._mailbox, tenant=tenant, request=name)
        except (BrokerAway, BrokerRefused) as error:
            raise BrokerUnavailable("The log of streams cannot be reached.") from error
        return Relay(
            self._mailbox,
            reply,
            stream=True,
            headers={"x-request-id": name},
            after=after,
            returns=returns,
        )


def _is_event_source(request: Request) -> bool:
    """Tell whether a browser's EventSource asks, or who says that it does as one."""
    return "text/event-stream" in request.headers.get("accept", "").lower()


def _come_again(refusal: Refusal) -> Response:
    """Return a stream that says why there is none now."""
    return Response(
        RETRY + error_event(refusal),
        headers={"cache-control": "no-store", "x-request-id": new_request_id()},
        media_type="text/event-stream",
    )


def _after(request: Request) -> int:
    """Return the id of the last event that the client has, -1 for none. Raises InvalidRequest.

    An EventSource keeps its URL when it asks again, so the later one of both counts.
    """
    texts = (request.query_params.get("starting_after"), request.headers.get("last-event-id"))
    return max((_event_id(text) for text in texts if text), default=-1)


def _event_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > EVENT_ID_DIGITS_MAX:
        raise InvalidRequest("An event id is a whole number.", param="starting_after")
    return int(text)
