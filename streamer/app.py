"""The application of a streamer that stands alone: replies by ticket."""

import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from headrace.answers import EXCEPTION_HANDLERS
from headrace.bus import Bus
from streamer.desk import Desk
from streamer.mailbox import Mailbox
from streamer.relay import Relay


def application(
    bus: Bus, mailbox: Mailbox, desk: Desk, extra: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the ASGI application of a streamer; `extra` routes are the node's own."""

    async def reply(request: Request) -> Relay:
        ticket = desk.claim(request.path_params["ticket"], now_s=time.time())
        reply = mailbox.open(
            tenant=ticket.tenant, request=ticket.request, deadline_s=ticket.deadline_s
        )
        reply.look_at_log()  # what came before its client did
        headers = {"x-request-id": ticket.request}
        return Relay(bus, mailbox, reply, stream=ticket.stream, headers=headers)

    return Starlette(
        routes=[Route("/v1/replies/{ticket}", reply, methods=["GET"]), *extra],
        exception_handlers=EXCEPTION_HANDLERS,
    )
