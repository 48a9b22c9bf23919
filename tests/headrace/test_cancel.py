"""What is cancelled while the broker is away is cancelled when it is back, whoever comes last."""

import asyncio

import pytest

from headrace import topology
from headrace.bus import BrokerAway, Bus, Message
from headrace.cancel import cancel_surely
from tests.broker import with_bus
from tests.queue import place, put, subjects_of
from tests.servers import NatsServer
from tests.waiting import until


def test_on_the_brokers_return_workers_are_told_again_for_those_that_come_back_later(
    own_nats: NatsServer,
) -> None:
    request = place()
    heard: list[str] = []

    async def take(message: Message) -> None:
        heard.append(message.subject)

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        await put(bus, [request])
        await bus.subscribe(f"cancels.*.{request.request}", take)
        await asyncio.to_thread(own_nats.stop)
        await until(lambda: not bus.connected)
        with pytest.raises(BrokerAway):
            await cancel_surely(bus, tenant=request.tenant, request=request.request)
        await asyncio.to_thread(own_nats.start)
        await until(lambda: len(heard) == 2)
        assert not await subjects_of(bus)

    with_bus(own_nats.url, test)
