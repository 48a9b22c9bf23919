"""The ingress application: routes, what they need, and how faults are answered."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route

from ingress.admit import Ingress
from ingress.handoff import Handoff
from ingress.routes import Generate, models, on_fault, on_http_error, on_refusal
from schemas.errors import Refusal


def application(ingress: Ingress, handoff: Handoff, extra: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the ASGI application of an ingress; `extra` routes are the node's own."""
    chat, completion = (Generate(ingress, handoff, chat=chat) for chat in (True, False))
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/models", models(ingress), methods=["GET"]),
            *extra,
        ],
        exception_handlers={
            Refusal: on_refusal,
            HTTPException: on_http_error,
            Exception: on_fault,
        },
    )
