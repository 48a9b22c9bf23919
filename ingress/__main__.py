"""`python -m ingress`: admits requests and sends their clients to a streamer."""

import asyncio
import sys
import time
from dataclasses import dataclass
from functools import partial

from headrace import files, lifecycle, topology
from headrace.bus import Bus
from headrace.http import WebSocketDoor, serve
from headrace.lifecycle import log_to_stdout, running_tasks, settle_memory
from headrace.node import Stopped, admin_port, broker, unique
from headrace.requests import cancel_route
from headrace.resume import stream_route
from headrace.settings import (
    ConnectionSettings,
    CorsSettings,
    LineSettings,
    ListenSettings,
    LogSettings,
    NodeSettings,
    command,
)
from headrace.telemetry import Readiness, admin_routes, registry_of
from headrace.ticket import load_tickets, put_back
from headrace.turnstile import Turnstile
from headrace.upkeep import Upkeep
from ingress.app import Application
from ingress.elsewhere import Elsewhere
from ingress.gate import Entrance
from ingress.reception import Reception
from ingress.redirect import Redirect
from ingress.resume import RestThere
from schemas import subjects


@dataclass(frozen=True, kw_only=True)
class IngressSettings(
    NodeSettings, ListenSettings, CorsSettings, LineSettings, LogSettings, ConnectionSettings
):
    """An ingress's settings."""


def run(settings: IngressSettings) -> None:
    """Run an ingress: admit requests, and send their clients to a streamer."""
    log_to_stdout(settings.name or "ingress")
    entrance = Entrance(settings.config, host=settings.host, log_prompts=settings.log_prompts)
    sys.exit(lifecycle.run(lambda stop: _main(settings, entrance, stop)))


async def _main(settings: IngressSettings, entrance: Entrance, stop: asyncio.Event) -> None:
    name = unique(settings.name or "ingress")
    try:
        async with broker(settings, name=name, stop=stop) as bus:
            await topology.wait_applied(bus, stop)
            await _serve(settings, entrance, name, bus, stop)
    except Stopped:
        return


async def _serve(
    settings: IngressSettings, entrance: Entrance, name: str, bus: Bus, stop: asyncio.Event
) -> None:
    reception = Reception(settings, entrance, bus, name=name, origins=settings.cors_origins)
    await reception.open()
    tickets = await load_tickets(bus)
    redirect = Redirect(bus, tickets, clock=time.monotonic)
    upkeep = Upkeep(bus)
    upkeep.on_remade(f"KV_{subjects.SECRETS}", partial(put_back, bus, tickets))

    def readiness() -> Readiness:
        detail = {
            "broker": bus.ready,
            "models": reception.models,
            "limits": reception.limits,
            "streamers": len(redirect.live),
        }
        if reception.ingress.draining:
            return Readiness("draining", detail)
        return Readiness("ready" if bus.ready and redirect.live else "starting", detail)

    async def prune_streamers() -> None:
        while True:
            await asyncio.sleep(topology.HEARTBEAT_S)
            redirect.tick()

    await redirect.start()
    await reception.start()
    turnstile = Turnstile(files.held(settings.bounds))
    readings = [*reception.readings(), *turnstile.readings()]
    pages = [
        stream_route(reception.desk.identify, RestThere(redirect)),
        cancel_route(bus, reception.desk.identify),
        *admin_routes(readiness, registry_of("ingress", readings)),
    ]
    serving = await serve(
        Application(reception.ingress, redirect, reception.cors, pages),
        host=settings.host,
        port=settings.port,
        websocket=WebSocketDoor(Elsewhere(lambda: redirect.live)),
        turnstile=turnstile,
    )
    async with admin_port(settings, "ingress", readiness, readings), running_tasks() as tasks:
        reception.run(tasks)
        tasks.start("upkeep", upkeep.forever())
        tasks.start("streamers", prune_streamers())
        tasks.start("probes", redirect.probe_forever())
        settle_memory()
        await stop.wait()
        reception.drain()
        await serving.close(grace_s=settings.grace_s)
    await reception.close()


if __name__ == "__main__":
    command(IngressSettings, run)()
