"""What a generation publishes is whole in the log, whatever the broker lets through at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

import workers.generation
from headrace import topology
from headrace.bus import Bus, Message
from headrace.settle import read_settlement
from schemas import subjects
from schemas.subjects import Settlement
from schemas.wire import Failed, Piece, Tokens, Usage, decode_frame
from tests.broker import with_bus
from tests.queue import envelope, place
from tests.servers import NatsServer
from tests.waiting import until
from workers.engine import Finish
from workers.generation import CHECKPOINT_FRAMES, Generation
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


def test_what_is_given_up_after_it_ran_elsewhere_is_charged_before_its_client_hears_of_it(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        generation = Generation(bus, envelope(place()), place="requests.x", worker="w", ack="ack")
        heard: list[Settlement | type[Failed]] = []

        async def sort(message: Message) -> None:
            if message.subject == subjects.SETTLEMENTS:
                heard.append(read_settlement(message.data))
            if message.subject != generation.envelope.reply:
                return
            if isinstance(decode_frame(message.data), Failed):
                heard.append(Failed)

        await bus.subscribe(">", sort)  # two subscriptions would be heard in any order
        await generation.claim_again()
        await generation.resume((), resume_at=0)
        await generation.fail("worker_lost", "It was given up.")
        await until(lambda: len(heard) == 2)
        [settlement, end] = heard
        assert isinstance(settlement, Settlement)
        assert settlement.tokens == len(generation.envelope.prompt) // 4 > 0
        assert end is Failed

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
        async with asyncio.timeout(60):
            await claiming
        assert generation.attempt == 1

    with_bus(own_nats.url, test)


class Steady:
    """An engine that makes as much as it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)

    async def generate(self, _work: Any, emit: Callable[[Sequence[Piece]], Awaitable[None]]) -> Any:
        number = 0
        while True:
            await self.go.acquire()
            await emit([Piece(0, "a", (number,))])
            number += 1


def test_what_is_acknowledged_late_is_not_sent_again_all_the_same(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where answers took longer than the tokens of a checkpoint, each one repeated all before."""
    monkeypatch.setattr(workers.generation, "API_TIMEOUT_S", 60.0)

    async def test(bus: Bus) -> None:
        generation = Generation(bus, envelope(place()), place="requests.x", worker="w", ack="ack")
        asked: list[Message] = []

        async def keep(message: Message) -> None:
            if message.reply:
                asked.append(message)

        async def acknowledge(message: Message) -> None:
            await bus.publish(message.reply, b'{"stream": "REPLIES", "seq": 1}')

        async def checkpoint(count: int) -> Tokens:
            for _ in range(CHECKPOINT_FRAMES):
                engine.go.release()
            await until(lambda: len(asked) == count)
            frame = decode_frame(asked[-1].data)
            assert isinstance(frame, Tokens)
            return frame

        await bus.subscribe(generation.envelope.reply, keep)
        claiming = asyncio.create_task(generation.claim())
        await until(lambda: asked)
        await acknowledge(asked[0])
        await claiming
        engine: Any = Steady()
        running = asyncio.create_task(generation.run(engine))
        assert (await checkpoint(2)).seq == 0
        assert (await checkpoint(3)).seq == 0
        await acknowledge(asked[1])
        await bus.api("INFO")  # it has come
        assert (await checkpoint(4)).seq == CHECKPOINT_FRAMES
        running.cancel()

    with_bus(own_nats.url, test)


class CutOff(Generation):
    """A claim during whose search the broker goes away once more."""

    server: NatsServer
    back: asyncio.Event
    searches = 0

    async def _find_claim(self) -> bool:
        self.searches += 1
        if self.searches > 1:
            return await super()._find_claim()
        await self.back.wait()  # only then it can go away again
        await asyncio.to_thread(self.server.kill)
        try:
            return await super()._find_claim()
        finally:
            await asyncio.to_thread(self.server.start)


def test_a_claim_is_searched_for_again_where_the_broker_goes_away_meanwhile(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        lost = Generation(bus, envelope(place()), place="requests.x", worker="w", ack="ack")
        await lost.claim()
        await asyncio.to_thread(own_nats.kill)
        again = CutOff(bus, lost.envelope, place="requests.x", worker="w", ack="ack")
        again.server, again.back = own_nats, asyncio.Event()
        claiming = asyncio.create_task(again.claim())
        await until(lambda: not bus.connected)
        await asyncio.to_thread(own_nats.start)
        again.back.set()
        async with asyncio.timeout(60):
            await claiming
        assert again.searches > 1
        assert again.attempt == lost.attempt

    with_bus(own_nats.url, test)
