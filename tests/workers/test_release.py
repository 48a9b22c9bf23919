"""Saying of attempts that did not die that they have not, once the broker can be reached."""

import asyncio
from functools import partial

import pytest

from headrace import topology
from headrace.bus import Bus, BusSettings, connection
from schemas.wire import Released
from tests.servers import NatsServer
from tests.waiting import until
from workers.recovery import read_log
from workers.release import Releases

REPLY = "replies.s.t.req_1"


async def _said(bus: Bus) -> list[int]:
    return [frame.attempt for _, frame in await read_log(bus, REPLY)]


def test_what_is_owed_while_the_broker_is_away_is_said_once_it_is_back(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        settings = BusSettings(own_nats.url)
        async with connection(settings, name="test", timeout_s=10) as bus:
            await topology.apply(bus)
            # What is acknowledged late must not be said again.
            monkeypatch.setattr(bus, "store", partial(bus.store, timeout_s=60.0))
            releases = Releases(bus)
            saying = asyncio.create_task(releases.say_forever())
            releases.owe(REPLY, Released(7, -1))
            await until(lambda: not releases._owed)
            await asyncio.to_thread(own_nats.stop)
            await until(lambda: not bus.connected)
            releases.owe(REPLY, Released(9, 3))
            releases.owe(REPLY, Released(9, 3))
            await asyncio.to_thread(own_nats.start)
            await until(lambda: bus.connected)

            async def both() -> bool:
                return await _said(bus) == [7, 9]

            await until(both)
            saying.cancel()

    asyncio.run(test())


def test_what_is_owed_is_bounded_and_the_oldest_goes_first(own_nats: NatsServer) -> None:
    async def test() -> None:
        settings = BusSettings(own_nats.url)
        async with connection(settings, name="test", timeout_s=10) as bus:
            await topology.apply(bus)
            releases = Releases(bus, owed_max=3)
            for attempt in (1, 2, 3, 4, 5):
                releases.owe(REPLY, Released(attempt, -1))
            await releases.say()
            assert await _said(bus) == [3, 4, 5]

    asyncio.run(test())
