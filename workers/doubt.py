"""Whether an attempt is still the request's last. Rule: acknowledgements are not fenced, so who may
have been replaced looks into the log before it acknowledges; in doubt it does not.
"""

from headrace.bus import BrokerAway, BrokerRefused, Bus
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
