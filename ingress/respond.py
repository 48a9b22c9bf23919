"""`POST /v1/responses`: a chat underneath, whose answer is a Responses object or its events."""

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope

from ingress.admit import Ingress, Origin, deadline_of
from ingress.cors import Cors
from ingress.handoff import Answer, Handoff
from ingress.routes import Generate, read_body
from schemas.errors import InvalidRequest
from schemas.responses import as_chat, own_words, parse_response, repeated


class Respond(Generate):
    """The POST, as an ASGI application."""

    def __init__(self, ingress: Ingress, handoff: Handoff, cors: Cors) -> None:
        super().__init__(ingress, handoff, cors, chat=True)

    async def _admit(
        self, scope: Scope, receive: Receive, request: str, headers: Mapping[str, str]
    ) -> Answer:
        caller = self._ingress.gate.identify(scope["headers"])
        deadline_s = deadline_of(Headers(scope=scope).get("x-request-timeout"))
        body = await read_body(Request(scope, receive))
        ask = parse_response(body)
        chat = as_chat(ask, ask.items(request))
        expected = self._handoff.expect(
            tenant=caller.tenant, request=request, deadline_s=deadline_s, keep=chat.keep
        )
        try:
            origin = Origin(caller, request, expected.streamer, deadline_s)
            await self._ingress.admit(origin, chat, body_bytes=len(body), response=repeated(ask))
        except InvalidRequest as refusal:
            expected.drop()
            raise own_words(refusal) from None
        except BaseException:
            expected.drop()
            raise
        return expected.answer(
            stream=bool(ask.stream), headers={"x-request-id": request, **headers}
        )
