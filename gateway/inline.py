"""The handoff `inline`: the streamer is in this process, so the POST itself carries the stream."""

import time
from collections.abc import Mapping

from headrace.bus import BrokerAway, BrokerRefused, Bus
from schemas.errors import BrokerUnavailable
from streamer.attach import attach
from streamer.buffer import OpenReply
from streamer.mailbox import Mailbox
from streamer.relay import Relay


class Inline:
    """Expects replies at this process's own mailbox. A `Handoff`."""

    def __init__(self, bus: Bus, mailbox: Mailbox) -> None:
        self._bus = bus
        self._mailbox = mailbox

    def expect(
        self, *, tenant: str, request: str, deadline_s: float, keep: bool, model: str = ""
    ) -> "ExpectedHere":
        """Open the reply."""
        reply = self._mailbox.open(
            tenant=tenant, request=request, deadline_s=deadline_s, keep=keep, model=model
        )
        reply.queued = False
        return ExpectedHere(self._mailbox, reply)

    async def attach(
        self,
        *,
        tenant: str,
        request: str,
        deadline_s: float,
        stream: bool,
        headers: Mapping[str, str],
        after: int = -1,
        returns: bool = False,
    ) -> Relay:
        """Open the reply for one more reader. Raises NotFound, Gone and BrokerUnavailable."""
        try:
            reply = await attach(
                self._bus, self._mailbox, tenant=tenant, request=request, deadline_s=deadline_s
            )
        except (BrokerAway, BrokerRefused) as error:
            raise BrokerUnavailable("The log of streams cannot be reached.") from error
        reply.lingers = True
        return Relay(
            self._mailbox, reply, stream=stream, headers=headers, after=after, returns=returns
        )


class ExpectedHere:
    """A reply that this process's mailbox expects."""

    def __init__(self, mailbox: Mailbox, reply: OpenReply) -> None:
        self._mailbox = mailbox
        self._reply = reply

    @property
    def streamer(self) -> str:
        """The streamer's name."""
        return self._mailbox.streamer

    def answer(self, *, stream: bool, headers: Mapping[str, str], lingers: bool = False) -> Relay:
        """Return the relay of the reply to its client."""
        self._reply.now_queued(now_s=time.monotonic())
        self._reply.lingers = lingers
        return Relay(self._mailbox, self._reply, stream=stream, headers=headers)

    def drop(self) -> None:
        """Expect nothing any more."""
        self._mailbox.close(self._reply)
