"""`GET /v1/streams/{id}`: a client that lost its stream goes on at the next event, at any node.

Rule: here is what is the same everywhere: whose stream is asked for, from which event on, and how
an EventSource is refused. Who carries the rest is the node's own affair.
"""

from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.routing import Route

from headrace import event_source
from headrace.requests import Identify, get_route, request_id, tenant_of
from schemas.errors import InvalidRequest, Refusal

EVENT_ID_DIGITS_MAX: Final = 9


class Rest(Protocol):
    """Carries the rest of a stream, or knows who does."""

    async def __call__(self, *, tenant: str, request: str, after: int, returns: bool) -> Any:
        """Return an ASGI answer with the events after the id `after`; -1 for all.

        `returns`: the client asks again by itself after the end, until it is answered with 204.
        Raises a Refusal.
        """
        ...


class Resume:
    """The route's handler."""

    def __init__(self, identify: Identify, rest: Rest) -> None:
        self._identify = identify
        self._rest = rest

    async def handle(self, request: Request) -> Any:
        """Return the rest of a stream. Raises a Refusal."""
        if not event_source.asks(request):
            return await self._answer(request, returns=False)
        try:
            return await self._answer(request, returns=True)
        except Refusal as refusal:
            if not refusal.retryable:
                raise
            return event_source.come_again(refusal)

    async def _answer(self, request: Request, *, returns: bool) -> Any:
        tenant = await tenant_of(self._identify, request)
        name = request_id(request)
        after = last_seen(request)
        return await self._rest(tenant=tenant, request=name, after=after, returns=returns)


def stream_route(identify: Identify, rest: Rest) -> Route:
    """Return the route; `identify` names the tenant of headers."""
    return get_route("/v1/streams/{request}", Resume(identify, rest).handle)


def last_seen(request: Request) -> int:
    """Return the id of the last event that the client has, -1 for none. Raises InvalidRequest.

    An EventSource keeps its URL when it asks again, so the later one of both counts.
    """
    texts = (request.query_params.get("starting_after"), request.headers.get("last-event-id"))
    return max((_event_id(text) for text in texts if text), default=-1)


def _event_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > EVENT_ID_DIGITS_MAX:
        raise InvalidRequest("An event id is a whole number.", param="starting_after")
    return int(text)
