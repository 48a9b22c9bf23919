"""Whether an attempt is still the request's last. Rule: acknowledgements are not fenced, so who may
have been replaced looks into the log before it acknowledges; in doubt it does not.
"""

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.pending import Work
from schemas.wire import Started
from workers.generation import Generation
from workers.recovery import read_log


async def is_replaced(bus: Bus, generation: Generation) -> bool:
    """Look in the log whether a later attempt has begun. Raises BrokerAway and BrokerRefused."""
    frames = await read_log(bus, generation.envelope.reply)
    return any(
        isinstance(frame, Started) and (frame.attempt or stored) > generation.attempt
        for stored, frame in frames
    )


async def may_be_replaced(bus: Bus, generation: Generation) -> bool:
    """Tell whether an acknowledgement could take a request from another that runs it."""
    if not generation.attempt:
        return False  # it had ended before we could claim it
    try:
        return await is_replaced(bus, generation)
    except (BrokerAway, BrokerRefused):
        return True  # not acknowledged, it is delivered again and found ended


class Standstills:
    """Has `look` done after each standstill of this process, one at a time and in a task of its
    own: it may wait long for the log, and the heart must beat meanwhile."""

    def __init__(self, bus: Bus, look: Work) -> None:
        self._bus = bus
        self._look = look
        self._due = self._looking = False

    def noticed(self) -> None:
        """Have it done now, or once more where it is being done."""
        self._due = True
        if not self._looking:
            self._looking = True
            self._bus.errands.spawn(self._look_while_due(), name="after a standstill")

    async def _look_while_due(self) -> None:
        try:
            while self._due:
                self._due = False
                await self._look()
        finally:
            self._looking = False
