"""Keeps what this worker runs from being delivered again. Rule: the event loop may be busy, the
lease must not lapse; but a loop that is stuck for good must lose it.

A thread with an event loop and a connection of its own sends the in-progress acks each second, as
long as the worker's loop has shown life within `STUCK_AFTER_S`.
"""

import asyncio
import logging
import threading
import time
from typing import Final

from headrace.bus import BrokerAway, BusSettings, connect

log = logging.getLogger(__name__)

RENEW_S: Final = 1.0
STUCK_AFTER_S: Final = 20.0
IN_PROGRESS: Final = b"+WPI"


class Leases:
    """The ack subjects of held requests, by request; used from the worker's own loop."""

    def __init__(self, settings: BusSettings, *, name: str) -> None:
        self._settings = settings
        self._name = name
        self._held: dict[str, str] = {}
        self._alive_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; all leases lapse by the consumer's ack_wait."""
        self._stop.set()

    def hold(self, request: str, ack: str) -> None:
        """Renew this request's lease from now on, on this ack subject."""
        self._held[request] = ack

    def release(self, request: str) -> None:
        """Renew it no more."""
        self._held.pop(request, None)

    def alive(self) -> None:
        """Show that the worker's event loop turns; called each second."""
        self._alive_s = time.monotonic()

    def _run(self) -> None:
        asyncio.run(self._renew_forever())

    async def _renew_forever(self) -> None:
        bus = await connect(self._settings, name=f"{self._name} leases", quiet=True)
        try:
            while not self._stop.is_set():
                await asyncio.sleep(RENEW_S)
                if time.monotonic() - self._alive_s > STUCK_AFTER_S:
                    log.error("the event loop is stuck: leases lapse")
                    continue
                try:
                    for ack in list(self._held.values()):
                        await bus.publish(ack, IN_PROGRESS)
                except BrokerAway:
                    continue
        finally:
            await bus.close()
