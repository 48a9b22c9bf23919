"""The ingress application: routes, what they need, and how faults are answered."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route

from ingress.routes import Generate, Ingress, models, on_fault, on_http_error, on_refusal
from schemas.errors import Refusal


def application(ingress: Ingress, extra: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the ASGI application of an ingress; `extra` routes belong to the node's operators."""
    return Starlette(
        routes=[
            Route("/v1/chat/completions", Generate(ingress, chat=True), methods=["POST"]),
            Route("/v1/completions", Generate(ingress, chat=False), methods=["POST"]),
            Route("/v1/models", models(ingress), methods=["GET"]),
            *extra,
        ],
        exception_handlers={
            Refusal: on_refusal,
            HTTPException: on_http_error,
            Exception: on_fault,
        },
    )
