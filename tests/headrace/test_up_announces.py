"""The model of an `up`, announced whatever becomes of the broker meanwhile."""

import asyncio

import pytest

from headrace import registry, topology
from headrace import up as headrace_up
from headrace.bus import BusSettings, Message, connection
from schemas.model import ModelCard
from tests.servers import NatsServer
from tests.waiting import until


@pytest.mark.slow
def test_a_model_is_announced_although_the_broker_goes_away_before(own_nats: NatsServer) -> None:
    heard: list[bytes] = []

    async def hear(message: Message) -> None:
        heard.append(message.data)

    async def scenario() -> None:
        settings = BusSettings(own_nats.url)
        async with connection(settings, name="test", timeout_s=30) as bus:
            await topology.apply(bus)
            card = ModelCard(name="m", created_s=1, max_model_len=1, files={})
            await registry.publish_card(bus, card, {})
            await bus.subscribe("$KV.models.m", hear)
            await asyncio.to_thread(own_nats.stop)
            await until(lambda: not bus.connected)
            announcing = asyncio.create_task(headrace_up._announce(bus, "m"))
            await asyncio.to_thread(own_nats.start)
            await until(lambda: heard or announcing.done(), within_s=30)
            assert not announcing.done()
            announcing.cancel()

    asyncio.run(scenario())
