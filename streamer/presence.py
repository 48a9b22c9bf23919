"""Where a streamer tells the ingresses that it is there, how busy it is, and that it stops."""

import asyncio
import contextlib
import time

from headrace import registry, topology
from headrace.bus import BrokerAway, BrokerRefused, Bus
from schemas import subjects
from schemas.model import StreamerEntry
from streamer.desk import Desk
from streamer.mailbox import Mailbox


class Presence:
    """A streamer's entry in the registry."""

    def __init__(self, bus: Bus, mailbox: Mailbox, desk: Desk, *, name: str) -> None:
        self.draining = False
        self._bus = bus
        self._mailbox = mailbox
        self._desk = desk
        self._name = name

    async def announce(self, public_url: str) -> None:
        """Say it once; a broker that is away hears it with the next beat."""
        entry = StreamerEntry(
            name=self._name,
            public_url=public_url,
            open_streams=self._mailbox.open_count,
            draining=self.draining,
        )
        with contextlib.suppress(BrokerAway):
            await registry.announce(self._bus, subjects.STREAMERS, self._name, entry)

    async def beat_forever(self, public_url: str) -> None:
        """Say it with every heartbeat, and have the desk look at its clock."""
        while True:
            await self.announce(public_url)
            await self._desk.tick(now_s=time.time())
            await asyncio.sleep(topology.HEARTBEAT_S)

    async def withdraw(self) -> None:
        """Take the entry away."""
        with contextlib.suppress(BrokerAway, BrokerRefused):
            await registry.withdraw(self._bus, subjects.STREAMERS, self._name)
