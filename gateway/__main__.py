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
    ListenSettings,
    NodeSettings,
    WebSocketSettings,
    api_keys,
    command,
    guard_address,
)
from headrace.telemetry import Readiness, admin_routes, registry_of
from ingress.admit import Ingress
from ingress.app import Application
from ingress.auth import Gate
from ingress.catalogue import Catalogue
from ingress.cors import Cors
from ingress.desk import Desk
from ingress.desk import serve as serve_desk
from ingress.telemetry import readings as ingress_readings
from streamer.app import client_routes
from streamer.mailbox import Mailbox
from streamer.response_socket import ROOMS
from streamer.telemetry import readings as streamer_readings
from streamer.websocket import Sockets


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(NodeSettings, ListenSettings, CorsSettings, WebSocketSettings):
    """A gateway's settings."""


def run(settings: GatewaySettings) -> None:
    """Run a gateway: admit requests, and stream their replies."""
    log_to_stdout(settings.name or "gateway")
    keys = api_keys(settings.config)
    guard_address(keys, settings.host)
    gate = Gate((key.tenant, key.sha256) for key in keys.keys)
    sys.exit(lifecycle.run(lambda stop: _main(settings, gate, stop)))


async def _main(settings: GatewaySettings, gate: Gate, stop: asyncio.Event) -> None:
    name = unique(settings.name or "gateway")
    try:
        async with broker(settings, name=name, stop=stop) as bus:
            await topology.wait_applied(bus, stop)
            await _serve(settings, gate, name, bus, stop)
    except Stopped:
        return


async def _serve(
    settings: GatewaySettings, gate: Gate, name: str, bus: Bus, stop: asyncio.Event
) -> None:
    mailbox = Mailbox(bus, name)
    catalogue = Catalogue(bus, clock=time.monotonic)
    threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="prompt")
    ingress = Ingress(bus, gate=gate, catalogue=catalogue, threads=threads)

    def readiness() -> Readiness:
        detail = {"broker": bus.connected, "models": [card.name for card in catalogue.cards()]}
        if ingress.draining:
            return Readiness("draining", detail)
        return Readiness("ready" if bus.connected else "starting", detail)

    desk = Desk(ingress)
    sockets = Sockets(mailbox, desk, rooms=ROOMS)
    await mailbox.start()
    await catalogue.start()
    await serve_desk(bus, desk)
    readings = [*ingress_readings(ingress), *streamer_readings(mailbox, sockets)]
    operator_routes = admin_routes(readiness, registry_of("gateway", readings))
    routes = [*client_routes(bus, mailbox, desk), *operator_routes]
    cors = Cors(settings.cors_origins, keyless=gate.keyless)
    serving = await serve(
        Application(ingress, Inline(bus, mailbox), cors, routes),
        host=settings.host,
        port=settings.port,
        websocket=WebSocketDoor(sockets, ping_s=settings.websocket_ping_s),
    )
    async with admin_port(settings, "gateway", readiness, readings), running_tasks() as tasks:
        tasks.start("models", catalogue.follow())
        tasks.start("replies", mailbox.tick_forever())
        settle_memory()
        await stop.wait()
        ingress.draining = True
        sockets.drain()
        await mailbox.drain(grace_s=settings.grace_s)
        await serving.close(grace_s=1.0)
    threads.shutdown(wait=False)


if __name__ == "__main__":
    command(GatewaySettings, run)()
