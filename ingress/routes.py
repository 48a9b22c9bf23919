"""The API's routes: each composes the stations in their order."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.answers import as_json, refused
from headrace.client_id import log_client_id
from headrace.cors import Cors
from headrace.deadline import timeout_s_of
from headrace.requests import peer_of
from ingress.admit import Ask, Ingress, Origin, parse
from ingress.handoff import Answer, Expected, Handoff
from ingress.idempotency import Attach, Keys, keyed
from ingress.ratelimit import headers_of, ratelimit_headers
from schemas.admit import Caller
from schemas.errors import Draining, InternalError, InvalidRequest, Refusal, RequestTooLarge
from schemas.model import ModelCard
from schemas.subjects import new_request_id
from schemas.wire import Envelope

log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for. `response` as in `Ingress.admit`; a `stored` answer is kept.

    `before_bytes` is the size of what it goes on from, which is not in the body.
    """

    ask: Ask
    stream: bool
    response: bytes | None = None
    stored: bool = False
    before_bytes: int = 0


class Generate:
    """`POST` of one endpoint, as an ASGI application."""

    def __init__(self, ingress: Ingress, handoff: Handoff, cors: Cors, *, chat: bool) -> None:
        self._ingress = ingress
        self._handoff = handoff
        self._cors = cors
        self._chat = chat
        self._keys = Keys(ingress.bus)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = self._ingress.counts
        request = new_request_id()
        counts.received += 1
        counts.inflight += 1
        headers = dict(self._cors.headers(scope["headers"]))
        answer: Answer
        try:
            answer = await self._admit(scope, receive, request, headers)
            counts.accepted += 1
        except Refusal as refusal:
            counts.refused += 1
            answer = refused(refusal, request, headers)
        except asyncio.CancelledError:
            # The node ends, past its grace, while the broker keeps us waiting: the server's own
            # answer would be a 500, and no JSON.
            counts.refused += 1
            answer = refused(Draining("This node is stopping; try again."), request, headers)
        except Exception:
            log.exception("%s failed here", request)
            fault = InternalError("The server failed; the fault is ours.")
            answer = refused(fault, request, headers)
        finally:
            counts.inflight -= 1
        await answer(scope, receive, send)

    async def _admit(
        self, scope: Scope, receive: Receive, request: str, headers: dict[str, str]
    ) -> Answer:
        """Admit a request; what its tenant has left is added to `headers`, refused or not."""
        caller = await self._ingress.gate.recognise(scope["headers"], peer=peer_of(scope))
        log_client_id(scope["headers"], request)
        try:
            return await self._admit_from(caller, scope, receive, request, headers)
        except Refusal:
            headers |= await ratelimit_headers(self._ingress.line, caller.tenant)
            raise

    async def _admit_from(
        self,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        request: str,
        headers: dict[str, str],
    ) -> Answer:
        timeout = Headers(scope=scope).get("x-request-timeout")
        policy = self._ingress.gate.policy(caller)
        timeout_s = timeout_s_of(timeout, default_s=policy.deadline_s)
        deadline_s = time.time() + timeout_s
        body = await read_body(Request(scope, receive))
        self._ingress.gate.check(caller)  # a body may take a minute
        asked = await self._parse(body, tenant=caller.tenant, request=request)
        ask = asked.ask
        key = keyed(
            scope["headers"],
            tenant=caller.tenant,
            request=request,
            deadline_s=deadline_s,
            path=scope["path"],
            body=body,
        )
        body_bytes = len(body)
        del body  # far larger, perhaps, than what was read from it, which may wait for long

        async def begin() -> Expected:
            expected = self._handoff.expect(
                tenant=caller.tenant,
                request=request,
                deadline_s=deadline_s,
                keep=ask.keep,
                model=ask.model,
            )
            try:
                origin = Origin(
                    caller,
                    request,
                    expected.streamer,
                    deadline_s,
                    keep_answer=asked.stored or key is not None,
                    left=partial(_left, receive),
                )
                admitted = await self._ingress.admit(
                    origin,
                    ask,
                    body_bytes=body_bytes + asked.before_bytes,
                    response=asked.response,
                )
                headers.update(headers_of(admitted.standings))
                return await self._accepted(asked, admitted.envelope, expected)
            except BaseException:
                expected.drop()
                raise

        begun = await begin() if key is None else await self._keys.once(key, begin)
        if isinstance(begun, Attach):
            log_client_id(scope["headers"], begun.request)
            headers |= await ratelimit_headers(self._ingress.line, caller.tenant)
            return await self._attach(asked, caller.tenant, begun, headers)
        return begun.answer(
            stream=asked.stream,
            headers={"x-request-id": request, **headers},
            lingers=key is not None,
        )

    async def _parse(self, body: bytes, *, tenant: str, request: str) -> Asked:
        """Read and check a body. Raises a Refusal."""
        ask = parse(body, chat=self._chat)
        return Asked(ask, stream=bool(ask.stream))

    async def _accepted(self, asked: Asked, envelope: Envelope, expected: Expected) -> Expected:
        """Do what is due once a request is in the queue; return who answers. Raises a Refusal."""
        return expected

    async def _attach(
        self, asked: Asked, tenant: str, there: Attach, headers: Mapping[str, str]
    ) -> Answer:
        """Return the answer of a request that is there already, for one more reader."""
        return await self._handoff.attach(
            tenant=tenant,
            request=there.request,
            deadline_s=there.deadline_s,
            stream=asked.stream,
            headers={"x-request-id": there.request, **headers},
        )


async def _left(receive: Receive) -> None:
    """Return once the client has left; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> bytes:
    """Return the body. Raises RequestTooLarge over the limit, as soon as it is known."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > BODY_BYTES_MAX:
        raise _too_large()
    chunks = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > BODY_BYTES_MAX:
                raise _too_large()
            chunks.append(chunk)
    except ClientDisconnect:
        raise InvalidRequest("The client left before its body was whole.") from None
    return b"".join(chunks)


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"The body is over the limit of {BODY_BYTES_MAX} bytes.")


def models(ingress: Ingress) -> Any:
    """Return the handler of `GET /v1/models`."""

    async def handle(request: Request) -> Response:
        scope = request.scope
        caller = await ingress.gate.recognise(scope["headers"], peer=peer_of(scope))
        policy = ingress.gate.policy(caller)
        cards = [_listed(card) for card in ingress.catalogue.cards() if policy.allows(card.name)]
        headers = await ratelimit_headers(ingress.line, caller.tenant)
        return as_json(
            {"object": "list", "data": cards},
            headers={"x-request-id": new_request_id(), **headers},
        )

    return handle


def model(ingress: Ingress) -> Any:
    """Return the handler of `GET /v1/models/{model}`; a name may hold slashes."""

    async def handle(request: Request) -> Response:
        scope = request.scope
        caller = await ingress.gate.recognise(scope["headers"], peer=peer_of(scope))
        policy = ingress.gate.policy(caller)
        card = ingress.catalogue.find(request.path_params["model"], policy).card
        headers = await ratelimit_headers(ingress.line, caller.tenant)
        return as_json(_listed(card), headers={"x-request-id": new_request_id(), **headers})

    return handle


def _listed(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "headrace",
        "max_model_len": card.max_model_len,
    }
