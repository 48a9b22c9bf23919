"""A stream asked for again, where the broker cannot tell what is in its log."""

import pytest
from starlette.requests import Request

from headrace import topology
from headrace.bus import Bus
from schemas import subjects
from schemas.admit import Caller
from schemas.errors import BrokerUnavailable, NotFound
from schemas.subjects import new_request_id
from streamer.mailbox import Mailbox
from streamer.resume import Resume
from tests.broker import with_bus
from tests.servers import NatsServer


async def _resume(bus: Bus, mailbox: Mailbox) -> None:
    async def identify(headers: object, *, peer: str | None = None) -> Caller:
        return Caller("t")

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": [],
        "path_params": {"request": new_request_id()},
    }
    await Resume(bus, mailbox, identify).handle(Request(scope))


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
