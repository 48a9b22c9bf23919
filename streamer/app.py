"""The HTTP application of a streamer that stands alone: replies by ticket."""

import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from headrace.answers import EXCEPTION_HANDLERS
from streamer.desk import Desk
from streamer.mailbox import Mailbox
from streamer.relay import Relay


def application(mailbox: Mailbox, desk: Desk, extra: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the ASGI application of a streamer; `extra` routes are the node's own."""

    async def reply(request: Request) -> Relay:
        ticket = desk.claim(request.path_params["ticket"], now_s=time.time())
        reply = mailbox.open(
            tenant=ticket.tenant, request=ticket.request, deadline_s=ticket.deadline_s
        )
        reply.look_at_log()  # what came before its client did
        # Any page may read it: whoever has the ticket may, and a browser that followed a redirect
        # to another origin does not say any more where it comes from.
        headers = {"x-request-id": ticket.request, "access-control-allow-origin": "*"}
        return Relay(mailbox, reply, stream=ticket.stream, headers=headers)

    return Starlette(
        routes=[
            Route("/v1/replies/{ticket}", reply, methods=["GET"]),
            *extra,
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
