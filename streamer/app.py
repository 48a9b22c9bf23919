"""The application of a streamer that stands alone: replies by ticket, and WebSockets."""

import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.answers import EXCEPTION_HANDLERS
from headrace.bus import Bus
from headrace.requests import cancel_route
from streamer.desk import Desk
from streamer.mailbox import Mailbox
from streamer.relay import Relay
from streamer.resume import Resume
from streamer.websocket import Sockets


def client_routes(bus: Bus, mailbox: Mailbox, sockets: Sockets) -> list[BaseRoute]:
    """Return the routes of every streamer: WebSockets at the paths of the POSTs, resume, cancel."""
    identify = sockets.admission.identify
    resume = Resume(bus, mailbox, identify)
    return [
        Route("/v1/streams/{request}", resume.handle, methods=["GET"]),
        cancel_route(bus, identify),
        WebSocketRoute("/v1/chat/completions", Plain(sockets.endpoint(chat=True))),
        WebSocketRoute("/v1/completions", Plain(sockets.endpoint(chat=False))),
    ]


class Plain:
    """An ASGI application that Starlette does not wrap: it wraps functions, not objects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def application(
    bus: Bus, mailbox: Mailbox, sockets: Sockets, desk: Desk, extra: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the ASGI application of a streamer; `extra` routes are the node's own."""

    async def reply(request: Request) -> Relay:
        ticket = desk.claim(request.path_params["ticket"], now_s=time.time())
        reply = mailbox.open(
            tenant=ticket.tenant,
            request=ticket.request,
            deadline_s=ticket.deadline_s,
            keep=ticket.keep,
        )
        reply.look_at_log()  # what came before its client did
        headers = {"x-request-id": ticket.request}
        return Relay(mailbox, reply, stream=ticket.stream, headers=headers)

    return Starlette(
        routes=[
            Route("/v1/replies/{ticket}", reply, methods=["GET"]),
            *client_routes(bus, mailbox, sockets),
            *extra,
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
