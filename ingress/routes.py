"""The API's routes: each composes the stations in their order."""

import logging
from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.answers import as_json, refused
from ingress.admit import Ingress, Origin, deadline_of, parse
from ingress.cors import Cors
from ingress.handoff import Answer, Handoff
from schemas.errors import InternalError, InvalidRequest, Refusal, RequestTooLarge
from schemas.model import ModelCard
from schemas.subjects import new_request_id

log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 16 * 1024 * 1024


class Generate:
    """`POST` of one endpoint, as an ASGI application."""

    def __init__(self, ingress: Ingress, handoff: Handoff, cors: Cors, *, chat: bool) -> None:
        self._ingress = ingress
        self._handoff = handoff
        self._cors = cors
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = self._ingress.counts
        request = new_request_id()
        counts.received += 1
        counts.inflight += 1
        headers = self._cors.headers(scope["headers"])
        answer: Answer
        try:
            answer = await self._admit(scope, receive, request, headers)
            counts.accepted += 1
        except Refusal as refusal:
            counts.refused += 1
            answer = refused(refusal, request, headers)
        except Exception:
            log.exception("%s failed here", request)
            fault = InternalError("The server failed; the fault is ours.")
            answer = refused(fault, request, headers)
        finally:
            counts.inflight -= 1
        await answer(scope, receive, send)

    async def _admit(
        self, scope: Scope, receive: Receive, request: str, headers: Mapping[str, str]
    ) -> Answer:
        caller = self._ingress.gate.identify(scope["headers"])
        deadline_s = deadline_of(Headers(scope=scope).get("x-request-timeout"))
        body = await read_body(Request(scope, receive))
        ask = parse(body, chat=self._chat)
        expected = self._handoff.expect(
            tenant=caller.tenant, request=request, deadline_s=deadline_s, keep=ask.keep
        )
        try:
            origin = Origin(caller, request, expected.streamer, deadline_s)
            await self._ingress.admit(origin, ask, body_bytes=len(body))
        except BaseException:
            expected.drop()
            raise
        return expected.answer(
            stream=bool(ask.stream), headers={"x-request-id": request, **headers}
        )


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
        ingress.gate.identify(request.scope["headers"])
        cards = [_listed(card) for card in ingress.catalogue.cards()]
        return as_json(
            {"object": "list", "data": cards}, headers={"x-request-id": new_request_id()}
        )

    return handle


def model(ingress: Ingress) -> Any:
    """Return the handler of `GET /v1/models/{model}`; a name may hold slashes."""

    async def handle(request: Request) -> Response:
        ingress.gate.identify(request.scope["headers"])
        card = ingress.catalogue.find(request.path_params["model"]).card
        return as_json(_listed(card), headers={"x-request-id": new_request_id()})

    return handle


def _listed(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "headrace",
        "max_model_len": card.max_model_len,
    }
