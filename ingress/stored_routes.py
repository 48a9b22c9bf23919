"""`/v1/responses/{id}`: stored responses are read, resumed, cancelled, deleted, on any ingress."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.answers import as_json
from headrace.bus import BrokerAway, BrokerRefused
from headrace.requests import cancel, get_route, peer_of
from ingress import stored
from ingress.admit import Ingress
from ingress.handoff import Answer, Handoff
from ingress.ratelimit import ratelimit_headers
from ingress.stored import Stored
from schemas.errors import BrokerUnavailable, InvalidRequest, NotFound
from schemas.responses import request_of

LIMIT: Final = 20
LIMIT_MAX: Final = 100
_NUMBER: Final = re.compile(r"[0-9]{1,9}")


def stored_routes(ingress: Ingress, handoff: Handoff) -> list[Route]:
    """Return the routes."""
    routes = _StoredRoutes(ingress, handoff)
    one = "/v1/responses/{response}"
    return [
        get_route(one, routes.retrieve),
        Route(one, routes.delete, methods=["DELETE"]),
        Route(f"{one}/cancel", routes.cancel, methods=["POST"]),
        Route(f"{one}/input_items", routes.input_items, methods=["GET"]),
    ]


class _StoredRoutes:
    def __init__(self, ingress: Ingress, handoff: Handoff) -> None:
        self._ingress = ingress
        self._bus = ingress.bus
        self._handoff = handoff

    async def retrieve(self, request: Request) -> Answer:
        """Answer with the object as it stands, or with its events from a place on."""
        found = await self._find(request)
        if not _flag(request.query_params, "stream"):
            return found.object()
        return await self._handoff.attach(
            tenant=found.tenant,
            request=found.stored.request,
            deadline_s=math.inf if found.stored.over else found.stored.record.deadline_s,
            stream=True,
            headers=found.headers,
            after=_number(request.query_params, "starting_after", default=-1),
        )

    async def delete(self, request: Request) -> Response:
        """Forget a response, after ending it if it runs."""
        found = await self._find(request)
        with _asking():
            if not found.stored.over:
                await cancel(self._bus, tenant=found.tenant, request=found.stored.request)
            await stored.remove(self._bus, tenant=found.tenant, request=found.stored.request)
        body = {"id": request.path_params["response"], "object": "response", "deleted": True}
        return as_json(body, headers=found.headers)

    async def cancel(self, request: Request) -> Response:
        """End a response in the background; one that has ended stays as it is."""
        found = await self._find(request)
        if not found.stored.record.background:
            what = "Only a response that was created with 'background' true can be cancelled."
            raise InvalidRequest(what, param="response_id")
        if found.stored.over:
            return found.object()
        with _asking():
            await cancel(self._bus, tenant=found.tenant, request=found.stored.request)
        return (await self._find(request)).object()

    async def input_items(self, request: Request) -> Response:
        """Answer with a page of the items that a response was made from."""
        found = await self._find(request)
        return as_json(page_of(found.stored.items, request.query_params), headers=found.headers)

    async def _find(self, request: Request) -> "_Found":
        """Return the response in the path, if it is the caller's. Raises a Refusal."""
        scope = request.scope
        caller = await self._ingress.gate.recognise(scope["headers"], peer=peer_of(scope))
        name: str = request.path_params["response"]
        what = request_of(name)
        with _asking():
            found = what and await stored.look(self._bus, tenant=caller.tenant, request=what)
        if not found:
            raise NotFound(f"Response with id '{name[:100]}' not found.", param="response_id")
        headers = await ratelimit_headers(self._ingress.line, caller.tenant)
        return _Found(caller.tenant, found, {"x-request-id": found.request, **headers})


@dataclass(frozen=True, slots=True)
class _Found:
    """A response that was asked for, whose it is, and the headers of the answer."""

    tenant: str
    stored: Stored
    headers: dict[str, str]

    def object(self) -> Response:
        """Return the object as it stands."""
        body = msgspec.Raw(self.stored.events.response())
        return as_json(body, headers=self.headers | {"cache-control": "no-store"})


@contextmanager
def _asking() -> Iterator[None]:
    """Say that the broker is away where it is. Raises BrokerUnavailable."""
    try:
        yield
    except (BrokerAway, BrokerRefused) as error:
        raise BrokerUnavailable("Stored responses cannot be reached.") from error


def page_of(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that `order`, `after` and `limit` ask for. Raises InvalidRequest."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' is 'asc' or 'desc'.", param="order")
    limit = _number(query, "limit", default=LIMIT)
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidRequest(f"'limit' is 1 to {LIMIT_MAX}.", param="limit")
    ordered = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        places = [number for number, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"There is no item '{after[:100]}' here.", param="after")
        ordered = ordered[places[-1] + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }


def _flag(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"'{name}' is true or false.", param=name)
    return text in ("true", "1")


def _number(query: Mapping[str, str], name: str, *, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"'{name}' is a whole number.", param=name)
    return int(text)
