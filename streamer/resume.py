"""The rest of a stream that is asked for again, at a streamer.

Rule: what the client gets is equal byte for byte to what it would have got. Live while the request
runs, a replay once it has ended, 410 after REPLIES has forgotten it, or, where the answer is kept,
after that is gone too.
"""

from headrace.bus import BrokerAway, BrokerRefused, Bus
from schemas.errors import BrokerUnavailable
from streamer.attach import attach
from streamer.mailbox import Mailbox
from streamer.relay import Relay


class RestHere:
    """Relays it itself. A `headrace.resume.Rest`."""

    def __init__(self, bus: Bus, mailbox: Mailbox) -> None:
        self._bus = bus
        self._mailbox = mailbox

    async def __call__(self, *, tenant: str, request: str, after: int, returns: bool) -> Relay:
        """Return the rest. Raises NotFound, Gone, Draining and BrokerUnavailable."""
        if not self._bus.connected:
            raise BrokerUnavailable("The log of streams cannot be reached.")
        try:
            reply = await attach(self._bus, self._mailbox, tenant=tenant, request=request)
        except (BrokerAway, BrokerRefused) as error:
            raise BrokerUnavailable("The log of streams cannot be reached.") from error
        return Relay(
            self._mailbox,
            reply,
            stream=True,
            headers={"x-request-id": request},
            after=after,
            returns=returns,
        )
