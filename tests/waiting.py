"""How tests wait: for a fact, and never longer than a bound."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(fact: Callable[[], T | Awaitable[T]], *, within_s: float = 15.0) -> T:
    """Return the first true value of `fact`. Raises TimeoutError when there is none in time."""
    async with asyncio.timeout(within_s):
        while True:
            value = fact()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)
