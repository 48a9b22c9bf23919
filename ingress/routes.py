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
from ingress.handoff import Answer, Expected, Handoff
from ingress.idempotency import Attach, Keys, keyed
from schemas.errors import InternalError, InvalidRequest, Refusal, RequestTooLarge
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
        self._keys = Keys(ingress.bus)

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
        asked = keyed(
            scope["headers"], tenant=caller.tenant, request=request, path=scope["path"], body=body
        )

        async def begin() -> Expected:
            expected = self._handoff.expect(
                tenant=caller.tenant, request=request, deadline_s=deadline_s, keep=ask.keep
            )
            try:
                origin = Origin(
                    caller, request, expected.streamer, deadline_s, keep_answer=asked is not None
                )
                await self._ingress.admit(origin, ask, body_bytes=len(body))
            except BaseException:
                expected.drop()
                raise
            return expected

        begun = await begin() if asked is None else await self._keys.once(asked, begin)
        if isinstance(begun, Attach):
            return await self._handoff.attach(
                tenant=caller.tenant,
                request=begun.request,
                stream=bool(ask.stream),
                headers={"x-request-id": begun.request, **headers},
            )
        return begun.answer(
            stream=bool(ask.stream),
            headers={"x-request-id": request, **headers},
            lingers=asked is not None,
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
