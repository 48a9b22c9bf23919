"""Keeps what this worker runs from being delivered again, and knows when that may have failed.

Rule: the event loop may be busy, the lease must not lapse; but a loop that is stuck for good must
lose it. A thread with an event loop and a connection of its own sends the in-progress acks each
second, as long as the worker's loop has shown life within `STUCK_AFTER_S`.

Acknowledgements are not fenced: one from a worker whose lease has lapsed would take a request out
of the queue that another runs by now. So a lease that was not renewed in time, for whatever reason,
is in doubt for good.
"""

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
from typing import Final

from headrace import topology
from headrace.bus import BrokerAway, Bus, BusSettings, connect

log = logging.getLogger(__name__)

RENEW_S: Final = 1.0
CONFIRM_S: Final = 1.0
SURE_S: Final = topology.ACK_WAIT_S - 0.5
"""How long after a renewal was sent the request is surely given to nobody else."""
STUCK_AFTER_S: Final = 20.0
IN_PROGRESS: Final = b"+WPI"


@dataclass(slots=True)
class Lease:
    """One request's lease. Pure: times are of one clock."""

    ack: str
    sure_s: float
    """When the last renewal was sent that the broker has confirmed; at first, the delivery."""
    _lapsed: bool = False

    def renewed(self, *, sent_s: float, heard_s: float) -> None:
        """Note a renewal that was sent and confirmed at these times."""
        self._lapsed = self.lapsed(now_s=heard_s)
        self.sure_s = sent_s

    def lapsed(self, *, now_s: float) -> bool:
        """Whether another worker may have been given the request, at any time until now."""
        return self._lapsed or now_s - self.sure_s > SURE_S


class Leases:
    """The leases of held requests, by request; used from the worker's own loop."""

    def __init__(self, settings: BusSettings, *, name: str) -> None:
        self._settings = settings
        self._name = name
        self._held: dict[str, Lease] = {}
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
        lease = self._held.get(request)
        if lease is None:
            self._held[request] = Lease(ack, time.monotonic())
        else:
            lease.ack = ack  # and it stays in doubt: we were asked because it had lapsed

    def release(self, request: str) -> None:
        """Renew it no more."""
        self._held.pop(request, None)

    def has(self, request: str) -> bool:
        """Whether this request's lease is renewed."""
        return request in self._held

    def lapsed(self, request: str) -> bool:
        """Whether another worker may have been given a request since we hold it."""
        lease = self._held.get(request)
        return lease is None or lease.lapsed(now_s=time.monotonic())

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
                    await self._renew(bus)
                except BrokerAway:
                    continue
        finally:
            await bus.close()

    async def _renew(self, bus: Bus) -> None:
        """Renew all leases. Raises BrokerAway where the broker does not confirm it."""
        leases = list(self._held.values())
        if not leases:
            return
        *others, last = leases
        sent_s = time.monotonic()
        for lease in others:
            await bus.publish(lease.ack, IN_PROGRESS)
        # One connection is read in order: who answers the last one has read all of them.
        await bus.request(last.ack, IN_PROGRESS, timeout_s=CONFIRM_S)
        heard_s = time.monotonic()
        for lease in leases:
            lease.renewed(sent_s=sent_s, heard_s=heard_s)
