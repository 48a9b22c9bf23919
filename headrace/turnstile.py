"""Where connections come in, and are turned away when there are too many. Rule: who is turned away
is answered unread and gone within two seconds; those inside notice nothing."""

import asyncio
import logging
from typing import Final

from headrace.answers import refused, written
from headrace.crowd import Bounds, Crowd
from headrace.telemetry import Reading
from schemas.errors import Refusal

log = logging.getLogger(__name__)

LINGER_S: Final = 1.0
"""Closing at once would make a reset of what the client has sent meanwhile, which may come before
the answer is read."""
LINGERING_MAX: Final = 256
"""More are answered and closed at once."""
SAID_S: Final = 10.0
"""The log says it no more often."""


class Turnstile:
    """The connections of one listener."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._crowd = Crowd(bounds or Bounds())
        self._lingering: set[asyncio.Transport] = set()
        self._said_s = float("-inf")

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return self._crowd.connections

    def enter(self, transport: asyncio.Transport) -> bool:
        """Let a connection in; else answer and close it, and return False."""
        peer = transport.get_extra_info("peername")
        refusal = self._crowd.enter(transport, peer[0] if peer else None)
        if refusal is None:
            return True
        self._say(refusal)
        answer = written(refused(refusal))
        if len(self._lingering) < LINGERING_MAX:
            transport.set_protocol(_Turned(transport, answer, self._lingering))
        else:
            transport.set_protocol(asyncio.Protocol())  # what was never let in has no end either
            transport.write(answer)
            transport.close()
        return False

    def leave(self, transport: asyncio.Transport) -> None:
        """Forget a connection; one that was turned away has no effect."""
        self._crowd.leave(transport)

    def readings(self) -> list[Reading]:
        """Return what /metrics shows."""
        crowd = self._crowd
        return [
            Reading("connections", "Client connections.", lambda: crowd.connections),
            Reading(
                "connections_refused",
                "Client connections turned away, by the bound that they were over.",
                lambda: crowd.refused,
                "counter",
                label="bound",
            ),
        ]

    def _say(self, refusal: Refusal) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._said_s >= SAID_S:
            self._said_s = now_s
            log.warning("connections are turned away: %s", refusal.message)


class _Turned(asyncio.Protocol):
    """A client that was turned away: it is answered once it speaks, since not every client expects
    an answer before, or after `LINGER_S`; all it sends is dropped."""

    def __init__(
        self, transport: asyncio.Transport, answer: bytes, lingering: set[asyncio.Transport]
    ) -> None:
        self._transport = transport
        self._answer = answer
        self._lingering = lingering
        lingering.add(transport)
        self._waiting = asyncio.get_running_loop().call_later(LINGER_S, self._give)

    def data_received(self, data: bytes) -> None:
        """Take what is not read."""
        if self._answer:
            self._give()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._waiting.cancel()
        self._lingering.discard(self._transport)

    def _give(self) -> None:
        self._transport.write(self._answer)
        self._transport.write_eof()
        self._answer = b""
        self._waiting.cancel()
        loop = asyncio.get_running_loop()
        self._waiting = loop.call_later(LINGER_S, self._transport.abort)
