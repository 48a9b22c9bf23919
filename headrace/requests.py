"""What requests of HTTP say of their caller, and `POST /v1/requests/{id}/cancel`: any node ends its
caller's request, wherever it stands."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.answers import as_json
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.client_id import log_client_id
from headrace.dismiss import dismiss
from headrace.inquire import withdraw_one
from headrace.peek import progress_in
from schemas import subjects
from schemas.admit import Caller
from schemas.errors import BrokerUnavailable, InvalidApiKey, NotFound, RequestCancelled

RawHeaders = Sequence[tuple[bytes, bytes]]


class Identify(Protocol):
    """Names the caller of headers that came from an address, None where they show no key."""

    async def __call__(self, headers: RawHeaders, *, peer: str | None = None) -> Caller | None:
        """Raises InvalidApiKey and Forbidden."""
        ...


def peer_of(scope: Mapping[str, Any]) -> str | None:
    """Return the address that an ASGI connection comes from, None for one that has none."""
    client = scope.get("client")
    return client[0] if client else None


async def tenant_of(identify: Identify, request: Request) -> str:
    """Return the tenant that a request's headers name. Raises InvalidApiKey and Forbidden."""
    caller = await identify(request.scope["headers"], peer=peer_of(request.scope))
    if caller is None:
        raise InvalidApiKey("You didn't provide an API key: send 'Authorization: Bearer KEY'.")
    return caller.tenant


def request_id(request: Request) -> str:
    """Return the request id in a path; a malformed one is unknown. Raises NotFound."""
    name: str = request.path_params["request"]
    if not subjects.is_request_id(name):
        raise NotFound(f"The request '{name[:100]}' does not exist.")
    return name


def get_route(path: str, handle: Callable[[Request], Awaitable[ASGIApp]]) -> Route:
    """Return a route of GET alone. HEAD is refused: who asks for a head of a stream does not read
    it, and would count as a reader whose leaving ends the request."""
    route = Route(path, handle, methods=["GET"])
    route.methods = {"GET"}
    return route


def cancel_route(bus: Bus, identify: Identify) -> Route:
    """Return the route; `identify` names the tenant of headers."""

    async def handle(request: Request) -> Response:
        tenant = await tenant_of(identify, request)
        name = request_id(request)
        log_client_id(request.scope["headers"], name)
        try:
            status = await cancel(bus, tenant=tenant, request=name)
        except (BrokerAway, BrokerRefused) as error:
            raise BrokerUnavailable("The queue cannot be reached.") from error
        return as_json({"id": name, "status": status}, headers={"x-request-id": name})

    return Route("/v1/requests/{request}/cancel", handle, methods=["POST"])


async def cancel(bus: Bus, *, tenant: str, request: str) -> str:
    """End a request if it has not ended; return `cancelled`, `finished` or `failed`.

    Raises NotFound where the tenant has no such request, BrokerAway and BrokerRefused.
    """
    found = await _end_in_queue(bus, tenant=tenant, request=request)
    if found is not None:
        return found
    if (await withdraw_one(bus, request, tenant=tenant)).answer is not None:
        return "cancelled"
    # It may have been let go meanwhile.
    found = await _end_in_queue(bus, tenant=tenant, request=request)
    if found is None:
        raise NotFound(f"The request '{request}' does not exist.")
    return found


async def _end_in_queue(bus: Bus, *, tenant: str, request: str) -> str | None:
    """End a request that has come to the queue; return what became of it, None for an unknown
    one. Raises BrokerAway and BrokerRefused."""
    dismissed = await dismiss(bus, subjects.requests_of(tenant=tenant, request=request))
    progress = await progress_in(bus, subjects.replies_to(request, tenant=tenant))
    if progress is None:
        return "cancelled" if dismissed else None
    if progress.ended == "finished":
        return "finished"
    if progress.ended is None or progress.code == RequestCancelled.code:
        return "cancelled"
    return "failed"
