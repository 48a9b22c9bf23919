"""A connection to a real nats-server for a test's own coroutine."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.bus import BrokerAway, Bus, BusSettings, connection

T = TypeVar("T")


async def answers(bus: Bus) -> bool:
    """Tell whether the broker answers: where it stood still, the connection may break even so."""
    try:
        await bus.api("INFO")
    except BrokerAway:
        return False
    return True


def with_bus(url: str, test: Callable[[Bus], Awaitable[T]]) -> T:
    """Run a coroutine function with a connection, and close that afterwards."""

    async def run() -> T:
        async with connection(BusSettings(url), name="test", timeout_s=30) as bus:
            return await test(bus)

    return asyncio.run(run())
