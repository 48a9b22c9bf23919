"""A stream asked for again at an ingress."""

import secrets
import time
from typing import Any

import pytest
from starlette.requests import Request

from headrace import topology
from headrace.bus import Bus
from headrace.resume import Resume
from headrace.ticket import Ticket, Tickets
from ingress.redirect import Redirect
from ingress.resume import RestThere
from schemas import subjects
from schemas.admit import Caller
from schemas.errors import NoStreamers
from schemas.subjects import new_request_id
from tests.broker import with_bus
from tests.ingress.test_redirect import Streamer
from tests.servers import NatsServer
from tests.sse import events_of

TICKETS = Tickets(secrets.token_bytes(32))
EVENT_SOURCE = (b"accept", b"text/event-stream")


async def ask(handoff: Any, request: str, *headers: tuple[bytes, bytes], query: bytes = b"") -> Any:
    async def identify(headers: object, *, peer: str | None = None) -> Caller:
        return Caller("t")

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": query,
        "headers": headers,
        "path_params": {"request": request},
    }
    return await Resume(identify, RestThere(handoff)).handle(Request(scope))


def test_a_redirect_carries_whose_stream_it_is_from_where_on_and_who_reads_it(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "ENTRY_TTL_S", 600)  # of one heartbeat

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        await Streamer(bus, "a").start()
        redirect = Redirect(bus, TICKETS, clock=time.monotonic)
        await redirect.start()
        request = new_request_id()
        last = (b"last-event-id", b"9")
        for headers, query, after, returns in (
            ((), b"", -1, False),
            ((last,), b"starting_after=7", 9, False),
            ((last, EVENT_SOURCE), b"starting_after=12", 12, True),
        ):
            answer = await ask(redirect, request, *headers, query=query)
            assert (answer.status_code, answer.headers["x-request-id"]) == (303, request)
            place, _, text = answer.headers["location"].rpartition("/")
            assert place == "http://a/v1/replies"
            ticket: Ticket = TICKETS.read(text, now_s=time.time())
            assert (ticket.tenant, ticket.request, ticket.stream) == ("t", request, True)
            assert (ticket.after, ticket.returns) == (after, returns)
            assert ticket.deadline_s == subjects.made_s(request) + topology.DEADLINE_S_MAX

    with_bus(own_nats.url, test)


def test_where_no_streamer_is_there_an_event_source_is_told_to_come_again(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        redirect = Redirect(bus, TICKETS, clock=time.monotonic)
        await redirect.start()
        request = new_request_id()
        with pytest.raises(NoStreamers):
            await ask(redirect, request)
        answer = await ask(redirect, request, EVENT_SOURCE)
        assert answer.status_code == 200
        [event] = events_of(answer.body)
        assert event.json["error"]["code"] == "no_streamers"

    with_bus(own_nats.url, test)
