"""What becomes of an accepted request whose client is refused after all: it does not run."""

import json
import time

import pytest

from headrace import topology
from headrace.bus import Bus, Message
from headrace.settle import read_settlement
from ingress.dispatch import dispatch
from ingress.idempotency import Keys
from ingress.respond import asked_of, record
from schemas import subjects
from schemas.errors import BrokerUnavailable, RequestTooLarge
from schemas.responses import parse_response
from schemas.subjects import RequestSubject, Settlement, new_request_id
from schemas.wire import Envelope, Sampling, Shape, pack_tokens
from tests.broker import with_bus
from tests.ingress.test_idempotency import Begun, Client
from tests.servers import NatsServer
from tests.waiting import until


async def queued(bus: Bus, *, words: str) -> tuple[bytes, Envelope]:
    """Put a response into the queue as it would be; return its body too."""
    request = new_request_id()
    envelope = Envelope(
        request=request,
        tenant="t",
        model="m",
        reply=f"replies.s.t.{request}",
        prompt=pack_tokens([1, 2]),
        sampling=Sampling(max_tokens=1),
        shape=Shape("response", "m", 5, False, 1, False),
        deadline_s=time.time() + 600,
    )
    await dispatch(bus, RequestSubject("online", "m", 3, "t", request), envelope)
    return json.dumps({"model": "m", "input": words}).encode(), envelope


async def recorded(bus: Bus, body: bytes, envelope: Envelope) -> None:
    asked = await asked_of(bus, parse_response(body), tenant="t", request=envelope.request)
    await record(bus, asked, envelope)


async def settlements(bus: Bus) -> list[Settlement]:
    """Return a list of what ingress is told from now on."""
    told: list[Settlement] = []

    async def settled(message: Message) -> None:
        told.append(read_settlement(message.data))

    await bus.subscribe(subjects.SETTLEMENTS, settled)
    return told


async def in_queue(bus: Bus) -> int:
    return int((await bus.api("STREAM.INFO.REQUESTS"))["state"]["messages"])


def test_a_response_too_large_to_store_leaves_the_queue_and_its_reservation_comes_back(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        told = await settlements(bus)
        body, envelope = await queued(bus, words="word " * (bus.payload_bytes_max // 5))
        with pytest.raises(RequestTooLarge):
            await recorded(bus, body, envelope)
        assert await in_queue(bus) == 0
        await until(lambda: told)
        assert told == [Settlement("t", envelope.request, "")]

    with_bus(own_nats.url, test)


def test_a_response_that_a_broker_now_away_had_accepted_leaves_the_queue_on_its_return(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        body, envelope = await queued(bus, words="x")
        own_nats.stop()
        await until(lambda: not bus.connected)
        with pytest.raises(BrokerUnavailable):
            await recorded(bus, body, envelope)
        own_nats.start()
        await until(lambda: bus.connected)

        async def empty() -> bool:
            return await in_queue(bus) == 0

        await until(empty)

    with_bus(own_nats.url, test)


def test_what_a_request_reserved_whose_key_was_taken_over_comes_back(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        told = await settlements(bus)
        cut, other = Client(bus, key="cut"), Client(bus, key="cut")

        async def begin() -> Begun:
            await other.stake(accepted=True)
            await other.queue()
            return await cut.begin()

        assert await Keys(bus).once(cut.asked, begin) == other.attach
        await until(lambda: told)
        assert told == [Settlement("t", cut.request, "")]

    with_bus(own_nats.url, test)
