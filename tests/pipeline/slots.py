"""Requests that keep their slot until the test says otherwise: who is served next is then a fact of
the queue, however fast the machine is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.metered import Metered, key_of

FIRST_TOKEN_AT_ONCE = hook("here", "too late", ttft_ms=0, itl_ms=600_000)
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Slot:
    """A slot that a request has."""

    tenant: str
    leave: asyncio.Event = field(default_factory=asyncio.Event)


class Slots:
    """The slots of a model, and who asks for them at the first door."""

    def __init__(self, house: Metered, model: str) -> None:
        self._house = house
        self._model = model
        self._got: asyncio.Queue[Slot] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def ask(self, tenant: str, count: int) -> None:
        """Send requests, and wait for nothing."""
        self._tasks += [asyncio.create_task(self._hold(tenant)) for _ in range(count)]

    async def next(self) -> Slot:
        """Wait for the next request to get a slot."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._got.get()

    async def _hold(self, tenant: str) -> None:
        # Bounded, so that all cost about the same to the fair order, whatever has been learned.
        body = chat(model=self._model, sim=FIRST_TOKEN_AT_ONCE, stream=True, max_tokens=2)
        headers = {"authorization": f"Bearer {key_of(tenant)}"}
        url = self._house.doors[0].url + CHAT
        async with (
            httpx.AsyncClient(timeout=None, follow_redirects=True, verify=False) as client,
            client.stream("POST", url, json=body, headers=headers) as answer,
        ):
            async for line in answer.aiter_lines():
                if "here" in line:
                    slot = Slot(tenant)
                    self._got.put_nowait(slot)
                    await slot.leave.wait()
                    return

    async def close(self) -> None:
        """Have all leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def slots(house: Metered, model: str) -> AsyncIterator[Slots]:
    """Ask for slots of a model; who has one at the end, or waits, leaves."""
    found = Slots(house, model)
    try:
        yield found
    finally:
        await found.close()
