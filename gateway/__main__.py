"""`python -m gateway`: serves clients, with the streamer in the same process."""

import asyncio
import sys
from dataclasses import dataclass

from gateway.inline import Inline
from headrace import files, lifecycle, topology
from headrace.bus import Bus
from headrace.http import WebSocketDoor, serve
from headrace.lifecycle import log_to_stdout, running_tasks, settle_memory
from headrace.node import Stopped, admin_port, broker, unique
from headrace.settings import (
    ConnectionSettings,
    CorsSettings,
    LineSettings,
    ListenSettings,
    LogSettings,
    NodeSettings,
    WebSocketSettings,
    command,
)
from headrace.telemetry import Readiness, admin_routes, registry_of
from headrace.turnstile import Turnstile
from headrace.upkeep import Upkeep
from ingress.app import Application
from ingress.gate import Entrance
from ingress.reception import Reception
from schemas import subjects
from streamer.app import client_routes
from streamer.mailbox import Mailbox
from streamer.orphans import Orphans
from streamer.rooms import ROOMS
from streamer.sockets import Sockets
from streamer.telemetry import readings as streamer_readings


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(
    NodeSettings,
    ListenSettings,
    CorsSettings,
    LineSettings,
    LogSettings,
    WebSocketSettings,
    ConnectionSettings,
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
    reception = Reception(settings, entrance, bus, name=name, origins=settings.cors_origins)
    await reception.open()
    mailbox = Mailbox(bus, name, serves=reception.workforce.serves)
    sockets = Sockets(mailbox, reception.desk, rooms=ROOMS)
    orphans = Orphans(bus, mailbox)
    upkeep = Upkeep(bus)
    upkeep.on_remade(subjects.REQUESTS, orphans.queue_remade)

    def readiness() -> Readiness:
        detail = {
            "broker": bus.ready,
            "models": reception.models,
            "limits": reception.limits,
        }
        if reception.ingress.draining:
            return Readiness("draining", detail)
        return Readiness("ready" if bus.ready else "starting", detail)

    await mailbox.start()
    await reception.start()
    turnstile = Turnstile(files.held(settings.bounds))
    readings = [
        *reception.readings(),
        *streamer_readings(mailbox, sockets),
        *turnstile.readings(),
    ]
    operator_routes = admin_routes(readiness, registry_of("gateway", readings))
    routes = [*client_routes(bus, mailbox, reception.desk), *operator_routes]
    serving = await serve(
        Application(reception.ingress, Inline(bus, mailbox), reception.cors, routes),
        host=settings.host,
        port=settings.port,
        websocket=WebSocketDoor(sockets, ping_s=settings.websocket_ping_s),
        turnstile=turnstile,
    )
    async with admin_port(settings, "gateway", readiness, readings), running_tasks() as tasks:
        reception.run(tasks)
        tasks.start("replies", mailbox.tick_forever())
        tasks.start("upkeep", upkeep.forever())
        tasks.start("orphans", orphans.watch())
        settle_memory()
        await stop.wait()
        reception.drain()
        sockets.drain()
        await mailbox.drain(grace_s=settings.grace_s)
        await serving.close(grace_s=1.0)
    await reception.close()


if __name__ == "__main__":
    command(GatewaySettings, run)()
