"""`python -m streamer`: carries replies to clients that an ingress sends here."""

import asyncio
import contextlib
import logging
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace import files, lifecycle, topology
from headrace.bus import BrokerAway, Bus, Message
from headrace.cors import Cors
from headrace.http import WebSocketDoor, serve
from headrace.lifecycle import log_to_stdout, running_tasks, settle_memory
from headrace.node import Stopped, admin_port, broker, unique
from headrace.settings import (
    QUEUE_PATIENCE_S,
    ConnectionSettings,
    CorsSettings,
    ListenSettings,
    NodeSettings,
    PublicUrl,
    QueuePatienceS,
    WebSocketSettings,
    command,
)
from headrace.sockets import is_loopback, is_unspecified
from headrace.telemetry import Readiness
from headrace.ticket import load_tickets, put_back
from headrace.turnstile import Turnstile
from headrace.upkeep import Upkeep
from headrace.workforce import Workforce
from schemas import subjects
from streamer.admission import RemoteAdmission
from streamer.app import Application
from streamer.desk import Desk
from streamer.mailbox import Mailbox
from streamer.orphans import Orphans
from streamer.presence import Presence
from streamer.rooms import ROOMS
from streamer.sockets import Sockets
from streamer.telemetry import desk_readings
from streamer.telemetry import readings as streamer_readings

log = logging.getLogger(__name__)

LINGER_S: Final = 0.5
"""A client needs a round trip to follow its redirect; meanwhile nothing here knows of it."""
LOOK_S: Final = 0.02
_FOLLOWED: Final = re.compile(r"(https?://[^/?#\s]+)?(/[^/?#\s]+)*/?", re.ASCII)
"""What a redirect may begin with: a URL, or a path on the origin that the client asked."""


@dataclass(frozen=True, kw_only=True)
class StreamerSettings(
    NodeSettings, ListenSettings, CorsSettings, WebSocketSettings, ConnectionSettings
):
    """A streamer's settings. Raises ValueError for a URL that no client could follow."""

    public_url: PublicUrl = None
    queue_patience_s: QueuePatienceS = QUEUE_PATIENCE_S

    def __post_init__(self) -> None:
        super().__post_init__()
        url = self.public_url
        if url is None:
            if is_unspecified(self.host):
                raise ValueError(
                    f"clients cannot be sent to {self.host}: name --public-url, a URL or a path"
                )
        elif not _FOLLOWED.fullmatch(url):
            raise ValueError(
                f"--public-url {url!r} is neither http(s)://HOST… nor a path such as /streams/a"
            )


def run(settings: StreamerSettings) -> None:
    """Run a streamer: carry replies to the clients that an ingress sends here."""
    # It needs no keys: who comes shows a ticket, or is identified by an ingress, which without keys
    # serves no client of a streamer that other machines reach.
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
    workforce = Workforce(bus, clock=time.monotonic)
    mailbox = Mailbox(bus, name, serves=workforce.serves)
    tickets = await load_tickets(bus)
    desk = Desk(bus, tickets, name)
    orphans = Orphans(bus, mailbox)
    upkeep = Upkeep(bus)
    upkeep.on_remade(subjects.REQUESTS, orphans.queue_remade)
    upkeep.on_remade(f"KV_{subjects.SECRETS}", partial(put_back, bus, tickets))
    mailbox.unexpected = lambda message: desk.unexpected(
        message.subject, message.data, now_s=time.time()
    )
    mailbox.awaited = desk.awaits
    presence = Presence(bus, mailbox, desk, name=name)

    def readiness() -> Readiness:
        if presence.draining:
            return Readiness("draining")
        return Readiness("ready" if bus.ready else "starting", {"broker": bus.ready})

    admission = RemoteAdmission(
        bus, local=is_loopback(settings.host), patience_s=settings.queue_patience_s
    )
    sockets = Sockets(mailbox, admission, rooms=ROOMS)
    turnstile = Turnstile(files.held(settings.bounds))

    async def alive(message: Message) -> None:
        with contextlib.suppress(BrokerAway):
            await bus.publish(message.reply, b"")

    await workforce.start()
    await mailbox.start()
    await bus.subscribe(subjects.streamer_alive(name), alive)
    serving = await serve(
        Application(bus, mailbox, admission, desk, _cors_of(settings)),
        host=settings.host,
        port=settings.port,
        websocket=WebSocketDoor(sockets, ping_s=settings.websocket_ping_s),
        turnstile=turnstile,
    )
    public_url = (settings.public_url or serving.url).rstrip("/")
    readings = [
        *streamer_readings(mailbox, sockets),
        *desk_readings(desk),
        *turnstile.readings(),
    ]
    async with admin_port(settings, "streamer", readiness, readings), running_tasks() as tasks:
        tasks.start("upkeep", upkeep.forever())
        tasks.start("replies", mailbox.tick_forever())
        tasks.start("orphans", orphans.watch())
        tasks.start("heartbeat", presence.beat_forever(public_url))
        tasks.start("workers", workforce.follow())
        settle_memory()
        await stop.wait()
        presence.draining = mailbox.draining = True
        await presence.announce(public_url)
        sockets.drain()
        await _drain(mailbox, desk, grace_s=settings.grace_s)
        await serving.close()
        await desk.close(now_s=time.time())
        await presence.withdraw()


def _cors_of(settings: StreamerSettings) -> Cors:
    """Return whose pages may read: without a word, this machine's, where nobody else is served."""
    origins = settings.cors_origins
    return Cors(origins, keyless=not origins and is_loopback(settings.host))


async def _drain(mailbox: Mailbox, desk: Desk, *, grace_s: float) -> None:
    """Let those come whose redirect is on its way, and all streams end, for at most `grace_s`."""
    now_s = time.monotonic()
    end_s, linger_s = now_s + grace_s, now_s + min(grace_s, LINGER_S)
    # Two counts, looked at for seconds once in a process's life: an event each would cost more.
    while (now_s := time.monotonic()) < linger_s or (  # noqa: ASYNC110
        now_s < end_s and (desk.waiting or mailbox.open_count)
    ):
        await asyncio.sleep(LOOK_S)
    await mailbox.drain(grace_s=0.0)


if __name__ == "__main__":
    command(StreamerSettings, run)()
