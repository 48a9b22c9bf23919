"""How tests wait: for a fact, and never longer than a bound.

Patience is counted in looks, with a pause before each: on a machine that is too busy, looks and
pauses take longer, and so does all that is waited for.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

PAUSE_S: Final = 0.01
HUNG: Final = 10
"""A look that takes so many times the patience has hung."""

T = TypeVar("T")


async def until(fact: Callable[[], T | Awaitable[T]], *, within_s: float = 15.0) -> T:
    """Return the first true value of `fact`. Raises TimeoutError when there is none in time."""
    async with asyncio.timeout(HUNG * within_s):
        for _ in range(_looks(within_s)):
            value = fact()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return value
            await asyncio.sleep(PAUSE_S)
    raise TimeoutError(f"not within {within_s:g} s")


def wait_for(fact: Callable[[], bool], *, within_s: float, what: str | Callable[[], str]) -> None:
    """Return once the fact holds; raise TimeoutError with `what` when it does not in time."""
    for _ in range(_looks(within_s)):
        if fact():
            return
        time.sleep(PAUSE_S)
    raise TimeoutError(f"not within {within_s:g} s: {what if isinstance(what, str) else what()}")


def _looks(within_s: float) -> int:
    return 1 + round(within_s / PAUSE_S)
