"""Running a coroutine now, as far as it goes without waiting.

Rule: what would wait is not started over and not forgotten; the rest of it is handed to a task.
A token's write almost never waits. Waking a task for it would cost more than the write.
"""

import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any


def start(work: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run `work` up to its first wait; return the rest of it, None when it is done.

    Raises what `work` raises. The rest must be awaited by a task of the same event loop.
    """
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return _rest(work, waits_for)


@types.coroutine
def _rest(work: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    while True:
        try:
            try:
                yield waits_for
            except BaseException as error:  # cancelled, most of all: `work` must hear of it
                waits_for = work.throw(error)
            else:
                waits_for = work.send(None)
        except StopIteration:
            return
