"""The engine's slots. Rule: first come, first served; who wants all of them waits for all."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Slots:
    """As many places as the engine runs requests at once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = count
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def one(self, *, unless: asyncio.Event) -> AsyncIterator[None]:
        """Hold a slot for the length of a block; hold none once `unless` is set meanwhile."""
        if self._free and not self._waiting:
            self._free -= 1
        elif not await self._wait(1, unless=unless):
            yield
            return
        try:
            yield
        finally:
            self._give_back(1)

    @asynccontextmanager
    async def others(self, *, unless: asyncio.Event) -> AsyncIterator[None]:
        """Hold all other slots as well, for one who holds a slot and must run alone."""
        if unless.is_set():  # it need not be alone to end, and may have been given no slot
            yield
            return
        # Its own slot goes back first: two of them would otherwise wait for each other.
        self._give_back(1)
        got = await self._wait(self._count, unless=unless)
        try:
            yield
        finally:
            if got:
                self._give_back(self._count - 1)
            else:
                self._free -= 1  # the block around gives it back

    async def _wait(self, count: int, *, unless: asyncio.Event) -> bool:
        """Wait for slots; return whether they were got."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, turn)
        self._waiting.append(entry)
        self._serve()
        leaving = asyncio.create_task(unless.wait())
        try:
            either: list[asyncio.Future[Any]] = [turn, leaving]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not turn.done():
                self._waiting.remove(entry)
                turn.cancel()
                self._serve()
        return not turn.cancelled()

    def _give_back(self, count: int) -> None:
        self._free += count
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= count
                turn.set_result(None)
