"""`python -m ingress`: admits requests and sends their clients to a streamer."""

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from headrace import lifecycle, topology
from headrace.bus import Bus
from headrace.http import serve
from headrace.lifecycle import log_to_stdout, running_tasks, settle_memory
from headrace.node import Stopped, admin_port, broker, unique
from headrace.requests import cancel_route
from headrace.settings import (
    CorsSettings,
    LineSettings,
    ListenSettings,
    LogSettings,
    NodeSettings,
    command,
)
from headrace.telemetry import Readiness, admin_routes, registry_of
from headrace.ticket import load_tickets, put_back
from headrace.upkeep import Upkeep
from headrace.workforce import Workforce
from ingress import desk
from ingress.admit import Ingress
from ingress.app import Application
from ingress.catalogue import Catalogue
from ingress.cors import Cors
from ingress.gate import Entrance
from ingress.line import line_of
from ingress.redirect import Redirect
from ingress.telemetry import readings as ingress_readings
from schemas import subjects


@dataclass(frozen=True, kw_only=True)
class IngressSettings(NodeSettings, ListenSettings, CorsSettings, LineSettings, LogSettings):
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
            await _serve(settings, entrance, bus, stop)
    except Stopped:
        return


async def _serve(
    settings: IngressSettings, entrance: Entrance, bus: Bus, stop: asyncio.Event
) -> None:
    gate = entrance.gate
    cors = Cors(settings.cors_origins, keyless=gate.keyless)

    def tenants_changed() -> None:
        cors.keyless = gate.keyless

    await entrance.open(bus, on_change=tenants_changed)
    catalogue = Catalogue(bus, clock=time.monotonic)
    workforce = Workforce(bus, clock=time.monotonic)
    tickets = await load_tickets(bus)
    redirect = Redirect(bus, tickets, clock=time.monotonic)
    upkeep = Upkeep(bus)
    upkeep.on_remade(f"KV_{subjects.SECRETS}", partial(put_back, bus, tickets))
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
        detail = {
            "broker": bus.ready,
            "models": [card.name for card in catalogue.cards()],
            "streamers": len(redirect.live),
        }
        if ingress.draining:
            return Readiness("draining", detail)
        return Readiness("ready" if bus.ready and redirect.live else "starting", detail)

    async def prune_streamers() -> None:
        while True:
            await asyncio.sleep(topology.HEARTBEAT_S)
            redirect.tick()

    await catalogue.start()
    await line.start()
    await workforce.start()
    await redirect.start()
    clerk = desk.Desk(ingress)
    await desk.serve(bus, clerk)
    readings = ingress_readings(ingress)
    pages = [
        cancel_route(bus, clerk.identify),
        *admin_routes(readiness, registry_of("ingress", readings)),
    ]
    serving = await serve(
        Application(ingress, redirect, cors, pages), host=settings.host, port=settings.port
    )
    async with admin_port(settings, "ingress", readiness, readings), running_tasks() as tasks:
        entrance.start(tasks)
        tasks.start("upkeep", upkeep.forever())
        tasks.start("models", catalogue.follow())
        tasks.start("streamers", prune_streamers())
        tasks.start("workers", workforce.follow())
        tasks.start("line", line.release_forever())
        tasks.start("probes", redirect.probe_forever())
        settle_memory()
        await stop.wait()
        ingress.draining = True
        line.room.drain()
        await serving.close(grace_s=settings.grace_s)
    threads.shutdown(wait=False)


if __name__ == "__main__":
    command(IngressSettings, run)()
