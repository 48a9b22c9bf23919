"""The ingress application: routes, what they need, and how faults are answered."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route

from headrace.answers import EXCEPTION_HANDLERS
from ingress.admit import Ingress
from ingress.handoff import Handoff
from ingress.routes import Generate, models


def application(ingress: Ingress, handoff: Handoff, extra: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the ASGI application of an ingress; `extra` routes are the node's own."""
    chat, completion = (Generate(ingress, handoff, chat=chat) for chat in (True, False))
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            *extra,
            Route("/v1/models", models(ingress), methods=["GET"]),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
