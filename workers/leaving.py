"""How a worker's requests leave it when it stops. Rule: what is given back stops at once, and what
has ended is kept and acknowledged first: another worker would have to find out that it has.
"""

import asyncio
from collections.abc import Collection
from typing import Any, Final

ENDING_S: Final = 2.0
"""What that takes by far, where the broker answers."""


async def leave(tasks: Collection[asyncio.Task[Any]], given_back: Collection[str]) -> None:
    """End tasks, which bear the names of their requests."""
    ending = []
    for task in tasks:
        if task.get_name() in given_back:
            task.cancel()
        else:
            ending.append(task)
    if ending:
        await asyncio.wait(ending, timeout=ENDING_S)
    for task in ending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
