"""Pulls requests and hears what else the broker says. Rule: we pull at our own pace.

Pulls go out as plain messages, since nats-py knows no priority groups; their statuses come back by
number. A status that names a missing consumer makes it anew.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from headrace import topology
from headrace.bus import BrokerAway, BrokerRefused, Bus, Message
from schemas import subjects
from schemas.model import ModelCard
from schemas.subjects import Lane, RequestSubject
from workers.credit import Credits, Place, Pull

log = logging.getLogger(__name__)

PUMP_S: Final = 0.05
_GONE: Final = frozenset({"503", "409"})
_NEXT: Final = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.REQUESTS}."

Deliver = Callable[[RequestSubject, Message], Awaitable[None]]


def deliveries(ack: str) -> int:
    """Return how often a message was delivered, by its ack subject; 0 if that is unknown.

    `$JS.ACK.<stream>.<consumer>.<deliveries>.…`, or with a domain and an account before the stream
    (NATS ADR-15).
    """
    tokens = ack.split(".")
    if len(tokens) < 9:
        return 0
    count = tokens[4] if len(tokens) == 9 else tokens[6]
    return int(count) if count.isdigit() else 0


class Intake:
    """The pulls of one worker; run `pump` as a task."""

    def __init__(
        self,
        bus: Bus,
        card: ModelCard,
        *,
        slots: int,
        held: Callable[[], int],
        deliver: Deliver,
    ) -> None:
        self.credits = Credits(slots=slots, partitions=card.partitions)
        self._bus = bus
        self._card = card
        self._held = held
        self._deliver = deliver
        self._inbox = bus.new_inbox()
        self._due = asyncio.Event()
        self._stopped = False

    async def start(self) -> None:
        """Listen for what pulls bring. Raises BrokerAway."""
        await self._bus.subscribe(f"{self._inbox}.*", self._message)
        self._bus.on_reconnect(self._reconnected)

    def stop(self) -> None:
        """Pull no more; what is on its way is still handled."""
        self._stopped = True

    def room_changed(self) -> None:
        """Look at once whether there is something to pull."""
        self._due.set()

    async def pump(self) -> None:
        """Send pulls as room allows; for ever."""
        while True:
            if self._bus.connected and not self._stopped:
                for pull in self.credits.plan(held=self._held(), now_s=time.monotonic()):
                    await self._send(pull)
            try:
                async with asyncio.timeout(PUMP_S):
                    await self._due.wait()
            except TimeoutError:
                continue
            self._due.clear()

    async def _send(self, pull: Pull) -> None:
        body = {
            "batch": pull.batch,
            "expires": int(pull.expires_s * topology.NANOSECONDS),
            "group": subjects.PULL_GROUP,
            "priority": pull.priority,
        }
        consumer = subjects.consumer_name(pull.place.lane, self._card.name, pull.place.partition)
        try:
            await self._bus.publish(
                _NEXT + consumer, msgspec.json.encode(body), reply=f"{self._inbox}.{pull.token}"
            )
        except BrokerAway:
            self.credits.reset()

    async def _reconnected(self) -> None:
        self.credits.reset()
        self.room_changed()

    async def _message(self, message: Message) -> None:
        headers = message.headers
        status = headers.get("Status") if headers else None
        if status is not None:
            await self._status(message.subject.rpartition(".")[2], status, message)
            return
        subject = RequestSubject.parse(message.subject)
        place = Place(subject.lane, subject.partition)
        self.credits.delivered(place, now_s=time.monotonic())
        self._due.set()
        await self._deliver(subject, message)

    async def _status(self, token: str, status: str, message: Message) -> None:
        # 404 and 408: nothing came in time. 409: the consumer is gone, or its leader moved, or it
        # has too many pulls. 503: nobody answers for it. 100 is a heartbeat, which we never ask.
        if status == "100":
            return
        place = self.credits.ended(token)
        self._due.set()
        if status in _GONE and place is not None:
            description = (message.headers or {}).get("Description", "")
            if status == "503" or "Deleted" in description:
                await self._make_consumer(place.lane, place.partition)

    async def _make_consumer(self, lane: Lane, partition: int) -> None:
        log.warning("the consumer of partition %d is gone: made anew", partition)
        try:
            await topology.apply_consumer(self._bus, lane, self._card.name, partition)
        except (BrokerAway, BrokerRefused) as error:
            log.warning("partition %d has no consumer: %s", partition, error)
