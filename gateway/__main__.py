"""`python -m gateway`: serves clients, with the streamer in the same process."""

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gateway.inline import Inline
from headrace import lifecycle, topology
from headrace.bus import Bus
from headrace.http import WebSocketDoor, serve
from headrace.lifecycle import log_to_stdout, running_tasks, settle_memory
from headrace.node import Stopped, admin_port, broker, unique
from headrace.settings import (
    CorsSettings,
    LineSettings,
    ListenSettings,
    LogSettings,
    NodeSettings,
    WebSocketSettings,
    command,
)
from headrace.telemetry import Readiness, admin_routes, registry_of
from headrace.upkeep import Upkeep
from headrace.workforce import Workforce
from ingress.admit import Ingress
from ingress.app import Application
from ingress.catalogue import Catalogue
from ingress.cors import Cors
from ingress.desk import Desk
from ingress.desk import serve as serve_desk
from ingress.gate import Entrance
from ingress.line import line_of
from ingress.telemetry import readings as ingress_readings
from schemas import subjects
from streamer.app import client_routes
from streamer.mailbox import Mailbox
from streamer.orphans import Orphans
from streamer.rooms import ROOMS
from streamer.sockets import Sockets
from streamer.telemetry import readings as streamer_readings


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(
    NodeSettings, ListenSettings, CorsSettings, LineSettings, LogSettings, WebSocketSettings
):
    """A gateway's settings."""


def run(settings: GatewaySettings) -> None:
    """Run a gateway: admit requests, and stream their replies."""
    log_to_stdout(settings.name or "gateway")
    entrance = Entrance(settings.config, host=settings.host, log_prompts=settings.log_prompts)
    sys.exit(lifecycle.run(lambda stop: _main(settings, entrance, stop)))


async def _main(settings: GatewaySettings, entrance: Entrance, stop: asyncio.Event) -> None:
    name = unique(settings.name or "gateway")
    try:
        async with broker(settings, name=name, stop=stop) as bus:
            await topology.wait_applied(bus, stop)
            await _serve(settings, entrance, name, bus, stop)
    except Stopped:
        return


async def _serve(
    settings: GatewaySettings, entrance: Entrance, name: str, bus: Bus, stop: asyncio.Event
) -> None:
    workforce = Workforce(bus, clock=time.monotonic)
    mailbox = Mailbox(bus, name, serves=workforce.serves)
    gate = entrance.gate
    cors = Cors(settings.cors_origins, keyless=gate.keyless)

    def tenants_changed() -> None:
        cors.keyless = gate.keyless

    await entrance.open(bus, on_change=tenants_changed)
    catalogue = Catalogue(bus, clock=time.monotonic)
    threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="prompt")
    line = line_of(settings, bus, gate.directory, workforce)
    ingress = Ingress(
        bus,
        gate=gate,
        catalogue=catalogue,
        workforce=workforce,
        line=line,
        threads=threads,
        inspection=entrance.inspection,
    )

    def readiness() -> Readiness:
        detail = {"broker": bus.ready, "models": [card.name for card in catalogue.cards()]}
        if ingress.draining:
            return Readiness("draining", detail)
        return Readiness("ready" if bus.ready else "starting", detail)

    upkeep = Upkeep(bus)
    orphans = Orphans(bus, mailbox)
    upkeep.on_remade(subjects.REQUESTS, orphans.queue_remade)
    desk = Desk(ingress)
    sockets = Sockets(mailbox, desk, rooms=ROOMS)
    await workforce.start()
    await mailbox.start()
    await catalogue.start()
    await line.start()
    await serve_desk(bus, desk)
    readings = [*ingress_readings(ingress), *streamer_readings(mailbox, sockets)]
    operator_routes = admin_routes(readiness, registry_of("gateway", readings))
    routes = [*client_routes(bus, mailbox, desk), *operator_routes]
    serving = await serve(
        Application(ingress, Inline(bus, mailbox), cors, routes),
        host=settings.host,
        port=settings.port,
        websocket=WebSocketDoor(sockets, ping_s=settings.websocket_ping_s),
    )
    async with admin_port(settings, "gateway", readiness, readings), running_tasks() as tasks:
        entrance.start(tasks)
        tasks.start("models", catalogue.follow())
        tasks.start("replies", mailbox.tick_forever())
        tasks.start("workers", workforce.follow())
        tasks.start("line", line.release_forever())
        tasks.start("upkeep", upkeep.forever())
        tasks.start("orphans", orphans.watch())
        settle_memory()
        await stop.wait()
        ingress.draining = True
        line.room.drain()
        sockets.drain()
        await mailbox.drain(grace_s=settings.grace_s)
        await serving.close(grace_s=1.0)
    threads.shutdown(wait=False)


if __name__ == "__main__":
    command(GatewaySettings, run)()
