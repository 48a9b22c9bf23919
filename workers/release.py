"""Says of attempts that ended through no fault of their request that they have not died.

Rule: it is said until the log has it. Who is cut off cannot say it at once, and three attempts of
which nothing is said make a dead letter of a request that killed nobody.
"""

import asyncio
import logging
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from schemas.wire import Released, encode_frame

log = logging.getLogger(__name__)

AGAIN_S: Final = 0.5
OWED_MAX: Final = 4096


class Releases:
    """What is still to be said; run `say_forever` as a task."""

    def __init__(self, bus: Bus, *, owed_max: int = OWED_MAX) -> None:
        self._bus = bus
        self._owed_max = owed_max
        self._owed: dict[int, tuple[str, Released]] = {}
        self._due = asyncio.Event()

    def owe(self, reply: str, frame: Released) -> None:
        """Have it said of an attempt, whose log is `reply`, that it has not died."""
        if len(self._owed) >= self._owed_max:
            del self._owed[next(iter(self._owed))]
        self._owed[frame.attempt] = (reply, frame)
        self._due.set()

    async def say(self) -> None:
        """Say all that is owed. Raises BrokerAway; what was not said then is owed still."""
        for attempt, (reply, frame) in list(self._owed.items()):
            try:
                await self._bus.store(reply, encode_frame(frame))
            except BrokerRefused as error:
                log.warning("attempt %d is counted as a death: %s", attempt, error)
            self._owed.pop(attempt, None)

    async def say_forever(self) -> None:
        """Say what is owed as soon as the broker takes it."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self.say()
            except BrokerAway:
                self._due.set()
                await asyncio.sleep(AGAIN_S)
