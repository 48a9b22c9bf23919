"""The API's routes: each composes the stations in their order."""

from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingress.admit import Ingress, Origin, deadline_of, parse
from ingress.handoff import Answer, Handoff
from schemas.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Refusal,
    RequestTooLarge,
)
from schemas.subjects import new_request_id

BODY_BYTES_MAX: Final = 16 * 1024 * 1024


class Generate:
    """`POST` of one endpoint, as an ASGI application."""

    def __init__(self, ingress: Ingress, handoff: Handoff, *, chat: bool) -> None:
        self._ingress = ingress
        self._handoff = handoff
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = self._ingress.counts
        request = new_request_id()
        counts.received += 1
        counts.inflight += 1
        answer: Answer
        try:
            answer = await self._admit(scope, receive, request)
            counts.accepted += 1
        except Refusal as refusal:
            counts.refused += 1
            answer = refused(refusal, request)
        finally:
            counts.inflight -= 1
        await answer(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, request: str) -> Answer:
        caller = self._ingress.gate.identify(scope["headers"])
        deadline_s = deadline_of(Headers(scope=scope).get("x-request-timeout"))
        ask = parse(await read_body(Request(scope, receive)), chat=self._chat)
        expected = self._handoff.expect(
            tenant=caller.tenant, request=request, deadline_s=deadline_s
        )
        try:
            await self._ingress.admit(Origin(caller, request, expected.streamer, deadline_s), ask)
        except BaseException:
            expected.drop()
            raise
        return expected.answer(stream=bool(ask.stream), headers={"x-request-id": request})


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


def refused(refusal: Refusal, request: str | None = None) -> Response:
    """Return the answer that a refusal gets."""
    headers = {"x-request-id": request or new_request_id()}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return as_json(refusal.body(), status=refusal.status, headers=headers)


def as_json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def models(ingress: Ingress) -> Any:
    """Return the handler of `GET /v1/models`."""

    async def handle(request: Request) -> Response:
        ingress.gate.identify(request.scope["headers"])
        cards = [
            {
                "id": card.name,
                "object": "model",
                "created": card.created_s,
                "owned_by": "headrace",
                "max_model_len": card.max_model_len,
            }
            for card in ingress.catalogue.cards()
        ]
        return as_json(
            {"object": "list", "data": cards}, headers={"x-request-id": new_request_id()}
        )

    return handle


async def on_refusal(_request: Request, error: Exception) -> Response:
    """Answer a Refusal that a handler raised."""
    assert isinstance(error, Refusal)
    return refused(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses, in the API's own shape."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        answer = refused(MethodNotAllowed(f"{what} is not allowed."))
    elif error.status_code == 404:
        answer = refused(NotFound(f"{what} does not exist."))
    else:
        answer = refused(InvalidRequest(error.detail))
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def on_fault(_request: Request, _error: Exception) -> Response:
    """Answer our own fault; the server's log says what it was."""
    return refused(InternalError("The server failed; the fault is ours."))
