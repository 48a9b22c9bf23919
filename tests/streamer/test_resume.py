"""A stream asked for again, where the broker cannot tell what is in its log."""

import pytest
from starlette.requests import Request
from starlette.responses import Response

from headrace import topology
from headrace.bus import Bus
from headrace.resume import Resume
from schemas import subjects
from schemas.admit import Caller
from schemas.errors import BrokerUnavailable, Draining, NotFound
from schemas.subjects import new_request_id
from streamer.mailbox import Mailbox
from streamer.relay import Relay
from streamer.resume import RestHere
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.sse import events_of


async def _resume(bus: Bus, mailbox: Mailbox, *headers: tuple[bytes, bytes]) -> Relay | Response:
    async def identify(headers: object, *, peer: str | None = None) -> Caller:
        return Caller("t")

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": headers,
        "path_params": {"request": new_request_id()},
    }
    answer: Relay | Response = await Resume(identify, RestHere(bus, mailbox)).handle(Request(scope))
    return answer


def test_an_event_source_is_refused_by_an_event_where_it_is_to_come_again(
    own_nats: NatsServer,
) -> None:
    """At a status of its own it would give up, though another node, or this one, goes on."""

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        mailbox = Mailbox(bus, "s")
        accept = (b"accept", b"text/event-stream")
        with pytest.raises(NotFound):
            await _resume(bus, mailbox, accept)
        mailbox.draining = True
        answer = await _resume(bus, mailbox, accept)
        assert isinstance(answer, Response)
        assert answer.status_code == 200
        [event] = events_of(bytes(answer.body))
        assert event.id is None
        assert event.json["error"]["code"] == "draining"
        with pytest.raises(Draining):
            await _resume(bus, mailbox)

    with_bus(own_nats.url, test)


@pytest.mark.slow  # a stream that is gone answers nothing: it takes the whole timeout
def test_a_stream_whose_log_cannot_be_read_is_unavailable_and_not_unknown(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        mailbox = Mailbox(bus, "s")
        with pytest.raises(NotFound):
            await _resume(bus, mailbox)
        await bus.api(f"STREAM.DELETE.{subjects.REPLIES}")
        with pytest.raises(BrokerUnavailable):
            await _resume(bus, mailbox)
        assert mailbox.open_count == 0

    with_bus(own_nats.url, test)
