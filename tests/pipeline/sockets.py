"""How a test has a socket of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.pipeline.asking import CHAT
from tests.pipeline.conftest import System
from tests.talk import Talk, talking


def on_socket(
    system: System, test: Callable[[Talk], Awaitable[None]], path: str = CHAT, **more: Any
) -> None:
    """Run a test on a socket of its own."""

    async def run() -> None:
        async with talking(system.socket_end.url, path, **more) as talk:
            await test(talk)

    asyncio.run(run())
