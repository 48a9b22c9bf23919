"""The key that all nodes sign tickets with."""

import asyncio

from headrace.bus import Bus
from headrace.ticket import load_tickets
from tests.broker import with_bus


def test_nodes_that_start_together_sign_with_one_key(url: str) -> None:
    async def start(bus: Bus) -> set[bytes]:
        return {each.key for each in await asyncio.gather(*(load_tickets(bus) for _ in range(8)))}

    [key] = with_bus(url, start)
    assert len(key) == 32

    async def later(bus: Bus) -> bytes:
        return (await load_tickets(bus)).key

    assert with_bus(url, later) == key
