"""The HTTP application of a streamer that stands alone: replies by ticket."""

import time
from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.answers import EXCEPTION_HANDLERS, refused
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.cors import EXPOSED, Cors
from headrace.event_source import come_again
from headrace.requests import cancel_route
from headrace.resume import last_seen, stream_route
from headrace.ticket import Ticket
from schemas.errors import BrokerUnavailable, MethodNotAllowed, Refusal
from streamer.admission import Admission
from streamer.attach import attach
from streamer.buffer import OpenReply
from streamer.desk import Claim, Desk
from streamer.mailbox import Mailbox
from streamer.relay import Relay
from streamer.resume import RestHere

REPLIES_PATH: Final = "/v1/replies/"
PAGES: Final = Cors({"*"}, keyless=False)
ANYONES: Final = {
    "access-control-allow-origin": "*",
    "access-control-expose-headers": EXPOSED,
}
"""Any page may read what a ticket gives: whoever has it may, and a browser that followed a redirect
to another origin does not say any more where it comes from."""


def client_routes(bus: Bus, mailbox: Mailbox, admission: Admission) -> list[BaseRoute]:
    """Return the routes of every streamer: resume and cancel."""
    return [
        stream_route(admission.identify, RestHere(bus, mailbox)),
        cancel_route(bus, admission.identify),
    ]


class Replies:
    """`GET /v1/replies/<ticket>`, as an ASGI application.

    HEAD is refused: a look at the link must not use the ticket up.
    """

    def __init__(self, bus: Bus, mailbox: Mailbox, desk: Desk) -> None:
        self._bus = bus
        self._mailbox = mailbox
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp
        if scope["method"] == "GET":
            answer = await self._answer(Request(scope))
        else:
            answer = _no_reply(scope)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> ASGIApp:
        """Return the reply that a ticket names, or why it is refused."""
        text = request.scope["path"].removeprefix(REPLIES_PATH)
        returns = False
        try:
            claim = self._desk.claim(text, now_s=time.time())
            returns = claim.ticket.returns
            # What it has seen since it was sent here counts.
            seen = last_seen(request) if returns else -1
            return await self._relay(claim, after=max(claim.ticket.after, seen))
        except Refusal as refusal:
            if returns and refusal.retryable:
                return come_again(refusal, ANYONES)
            return refused(refusal, more_headers=ANYONES)

    async def _relay(self, claim: Claim, *, after: int) -> Relay:
        """Return the reply of a ticket that was taken. Raises a Refusal."""
        ticket = claim.ticket
        reply = await self._attach(ticket) if ticket.attach else self._open(claim)
        reply.lingers = ticket.lingers
        headers = {"x-request-id": ticket.request, **ANYONES, **ticket.ratelimit}
        return Relay(
            self._mailbox,
            reply,
            stream=ticket.stream,
            headers=headers,
            after=after,
            returns=ticket.returns,
        )

    def _open(self, claim: Claim) -> OpenReply:
        ticket = claim.ticket
        reply = self._mailbox.open(
            tenant=ticket.tenant,
            request=ticket.request,
            deadline_s=ticket.deadline_s,
            keep=ticket.keep,
            model=ticket.model,
        )
        reply.begun_without(claim.heard_seq)
        return reply

    async def _attach(self, ticket: Ticket) -> OpenReply:
        try:
            return await attach(
                self._bus,
                self._mailbox,
                tenant=ticket.tenant,
                request=ticket.request,
                deadline_s=ticket.deadline_s,
            )
        except (BrokerAway, BrokerRefused) as error:
            raise BrokerUnavailable("The log of streams cannot be reached.") from error


def _no_reply(scope: Scope) -> Response:
    """Return what answers a request that is no GET."""
    if scope["method"] == "OPTIONS":  # a browser asks again where it was redirected to
        headers = PAGES.preflight(scope["headers"])
        if headers is not None:
            return Response(status_code=204, headers=headers)
    refusal = MethodNotAllowed("A reply can be read by GET only.")
    return refused(refusal, more_headers={"allow": "GET", **ANYONES})


class Application:
    """The ASGI application of a streamer; `extra` routes are the node's own.

    Replies go straight to their handler: Starlette would wrap each token's `send` three times.
    """

    def __init__(
        self,
        bus: Bus,
        mailbox: Mailbox,
        admission: Admission,
        desk: Desk,
        cors: Cors,
        extra: Sequence[BaseRoute] = (),
    ) -> None:
        self._cors = cors
        self._replies = Replies(bus, mailbox, desk)
        self._rest = Starlette(
            routes=[*client_routes(bus, mailbox, admission), *extra],
            exception_handlers=EXCEPTION_HANDLERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(REPLIES_PATH):
            await self._replies(scope, receive, send)
        else:
            await self._cors.serve(self._rest, scope, receive, send)
