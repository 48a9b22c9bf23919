"""The ingress application: routes, what they need, and how faults are answered."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from headrace.answers import EXCEPTION_HANDLERS
from headrace.cors import Cors
from ingress.admit import Ingress
from ingress.count import count
from ingress.handoff import Handoff
from ingress.reference import page, specification
from ingress.respond import Respond
from ingress.routes import Generate, model, models
from ingress.stored_routes import stored_routes


class Application:
    """The ASGI application of an ingress; `extra` routes are the node's own.

    POSTs that generate go straight to their handler: Starlette's middlewares would wrap each
    token's `send` twice.
    """

    def __init__(
        self, ingress: Ingress, handoff: Handoff, cors: Cors, extra: Sequence[BaseRoute] = ()
    ) -> None:
        self._cors = cors
        self._generate = {
            "/v1/chat/completions": Generate(ingress, handoff, cors, chat=True),
            "/v1/completions": Generate(ingress, handoff, cors, chat=False),
            "/v1/responses": Respond(ingress, handoff, cors),
        }
        self._rest = Starlette(
            routes=[
                *extra,
                *(Route(path, app, methods=["POST"]) for path, app in self._generate.items()),
                Route("/v1/models", models(ingress), methods=["GET"]),
                Route("/v1/responses/input_tokens", count(ingress), methods=["POST"]),
                *stored_routes(ingress, handoff),
                Route("/v1/models/{model:path}", model(ingress), methods=["GET"]),
                Route("/openapi.json", specification(), methods=["GET"]),
                Route("/docs", page(), methods=["GET"]),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            generate = self._generate.get(scope["path"])
            if generate is not None:
                await generate(scope, receive, send)
                return
        await self._cors.serve(self._rest, scope, receive, send)
