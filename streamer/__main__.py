"""`python -m streamer`: carries replies to clients that an ingress sends here."""

import asyncio
import contextlib
import logging
import sys
import time
from dataclasses import dataclass

from headrace import lifecycle, registry, topology
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.http import WebSocketDoor, serve
from headrace.lifecycle import log_to_stdout, running_tasks, settle_memory
from headrace.node import Stopped, admin_port, broker, unique
from headrace.settings import (
    ListenSettings,
    NodeSettings,
    PublicUrl,
    WebSocketSettings,
    command,
)
from headrace.telemetry import Readiness
from headrace.ticket import load_tickets
from schemas import subjects
from schemas.model import StreamerEntry
from streamer.admission import RemoteAdmission
from streamer.app import application
from streamer.desk import Desk
from streamer.mailbox import Mailbox
from streamer.telemetry import readings as streamer_readings
from streamer.websocket import Sockets

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StreamerSettings(NodeSettings, ListenSettings, WebSocketSettings):
    """A streamer's settings."""

    public_url: PublicUrl = None


def run(settings: StreamerSettings) -> None:
    """Run a streamer: carry replies to the clients that an ingress sends here."""
    log_to_stdout(settings.name or "streamer")
    sys.exit(lifecycle.run(lambda stop: _main(settings, stop)))


async def _main(settings: StreamerSettings, stop: asyncio.Event) -> None:
    name = unique(settings.name or "streamer")
    try:
        async with broker(settings, name=name, stop=stop) as bus:
            await topology.wait_applied(bus, stop)
            await _serve(settings, name, bus, stop)
    except Stopped:
        return


async def _serve(settings: StreamerSettings, name: str, bus: Bus, stop: asyncio.Event) -> None:
    mailbox = Mailbox(bus, name)
    desk = Desk(bus, await load_tickets(bus), name)
    mailbox.unexpected = lambda message: desk.unexpected(
        message.subject, message.data, now_s=time.time()
    )
    draining = False

    def readiness() -> Readiness:
        if draining:
            return Readiness("draining")
        return Readiness("ready" if bus.connected else "starting", {"broker": bus.connected})

    sockets = Sockets(mailbox, RemoteAdmission(bus))
    await mailbox.start()
    serving = await serve(
        application(mailbox, desk),
        host=settings.host,
        port=settings.port,
        websocket=WebSocketDoor(sockets, ping_s=settings.websocket_ping_s),
    )
    public_url = (settings.public_url or serving.url).rstrip("/")

    async def announce() -> None:
        entry = StreamerEntry(
            name=name,
            public_url=public_url,
            open_streams=mailbox.open_count,
            draining=draining,
        )
        with contextlib.suppress(BrokerAway):
            await registry.announce(bus, subjects.STREAMERS, name, entry)

    async def beat() -> None:
        while True:
            await announce()
            await desk.tick(now_s=time.time())
            await asyncio.sleep(topology.HEARTBEAT_S)

    readings = streamer_readings(mailbox, sockets)
    async with admin_port(settings, "streamer", readiness, readings), running_tasks() as tasks:
        tasks.start("replies", mailbox.tick_forever())
        tasks.start("heartbeat", beat())
        settle_memory()
        await stop.wait()
        draining = True
        await announce()
        sockets.drain()
        await mailbox.drain(grace_s=settings.grace_s)
        await serving.close()
        with contextlib.suppress(BrokerAway, BrokerRefused):
            await registry.withdraw(bus, subjects.STREAMERS, name)


if __name__ == "__main__":
    command(StreamerSettings, run)()
