"""`POST /v1/responses/input_tokens`: how long a response's prompt is, without making it.

Rule: it is rendered and tokenised as the response's own would be, so both numbers are the same, and
a body that is wrong there is wrong here. No moderator looks at it: nothing is made. It costs one
request of the tenant's and no tokens.
"""

import time
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from headrace.answers import as_json, refused
from headrace.client_id import log_client_id
from headrace.requests import peer_of
from ingress.able import check_able
from ingress.admit import Ingress
from ingress.ratelimit import headers_of, ratelimit_headers
from ingress.respond import asked_of
from ingress.routes import read_body
from schemas.admit import Caller
from schemas.errors import BrokerUnavailable, Draining, InvalidRequest, Refusal
from schemas.responses import own_words, parse_response
from schemas.subjects import new_request_id

COUNT_S_MAX: Final = 60.0
"""How long it counts as an open request, should this node die meanwhile."""


def count(ingress: Ingress) -> Any:
    """Return the handler."""

    async def handle(request: Request) -> Response:
        scope = request.scope
        caller = await ingress.gate.recognise(scope["headers"], peer=peer_of(scope))
        name = new_request_id()
        log_client_id(scope["headers"], name)
        try:
            body = await read_body(request)
            ingress.gate.check(caller)  # a body may take a minute
            return await _count(ingress, caller, body, name)
        except Refusal as refusal:
            own = own_words(refusal) if isinstance(refusal, InvalidRequest) else refusal
            return refused(own, name, await ratelimit_headers(ingress.line, caller.tenant))

    return handle


async def _count(ingress: Ingress, caller: Caller, body: bytes, name: str) -> Response:
    """Count the tokens of a request's prompt. Raises a Refusal."""
    if ingress.draining:
        raise Draining("This node is stopping.")
    tenant = caller.tenant
    asked = await asked_of(ingress.bus, parse_response(body), tenant=tenant, request=name)
    policy = ingress.gate.policy(caller)
    model = ingress.catalogue.find(asked.ask.model, policy)
    check_able(asked.ask, model.card)
    if not ingress.bus.ready:
        raise BrokerUnavailable("The queue cannot be reached.")
    reservations = ingress.line.reservations
    standings = await reservations.reserve(
        tenant, request=name, tokens=0, deadline_s=time.time() + COUNT_S_MAX
    )
    used: int | None = None  # nothing, where it is refused
    try:
        body_bytes = len(body) + asked.before_bytes
        tokens, _ = await ingress.costed(model, asked.ask, policy, body_bytes=body_bytes)
        used = 0
    finally:
        reservations.settle(tenant, request=name, tokens=used)
    return as_json(
        {"object": "response.input_tokens", "input_tokens": len(tokens)},
        headers={"x-request-id": name, **headers_of(standings)},
    )
