"""What a generation publishes is whole in the log, whatever the broker lets through at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace import topology
from headrace.bus import Bus
from schemas.wire import Piece, Usage
from tests.broker import with_bus
from tests.queue import envelope, place
from tests.servers import NatsServer
from workers.engine import Finish
from workers.generation import Generation
from workers.history import read_history
from workers.recovery import read_log

TEXT = "x" * 40_000
COUNT = 75


class Wordy:
    """An engine whose pieces are large, so that few of them are too much for one message."""

    async def generate(self, _work: Any, emit: Callable[[Sequence[Piece]], Awaitable[None]]) -> Any:
        for number in range(COUNT):
            await emit([Piece(0, TEXT, (number,))])
        return Finish(("stop",), Usage(1, COUNT, 0))


def test_more_than_one_message_holds_is_stored_in_several(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        generation = Generation(bus, envelope(place()), place="requests.x", worker="w", ack="ack")
        await generation.claim()
        engine: Any = Wordy()
        await generation.run(engine)
        history = read_history(await read_log(bus, generation.envelope.reply))
        assert history.ended
        assert [piece.tokens for piece in history.pieces] == [(n,) for n in range(COUNT)]

    with_bus(own_nats.url, test)


def test_a_claim_whose_acknowledgement_was_lost_is_found_in_the_log(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        lost = Generation(bus, envelope(place()), place="requests.x", worker="w", ack="ack")
        await lost.claim()
        again = Generation(bus, lost.envelope, place="requests.x", worker="w", ack="ack")
        assert await again._find_claim()
        assert again.attempt == lost.attempt
        another = Generation(bus, lost.envelope, place="requests.x", worker="v", ack="ack")
        assert not await another._find_claim()

    with_bus(own_nats.url, test)


def test_a_claim_waits_for_a_broker_that_is_away(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        generation = Generation(bus, envelope(place()), place="requests.x", worker="w", ack="ack")
        await asyncio.to_thread(own_nats.kill)
        claiming = asyncio.create_task(generation.claim())
        await asyncio.to_thread(own_nats.start)
        async with asyncio.timeout(10):
            await claiming
        assert generation.attempt == 1

    with_bus(own_nats.url, test)
