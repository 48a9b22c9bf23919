"""What the start of every tier has in common: a broker that may come late, and an admin port."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.routing import BaseRoute

from headrace.bus import Bus, BusSettings, connect
from headrace.http import Serving, serve
from headrace.settings import NodeSettings
from headrace.telemetry import Readiness, Reading, admin_app, registry_of


def bus_settings(settings: NodeSettings) -> BusSettings:
    """Return where the broker is."""
    return BusSettings(
        url=settings.nats_url,
        creds=str(settings.nats_creds) if settings.nats_creds else None,
        ca=str(settings.nats_ca) if settings.nats_ca else None,
    )


def unique(name: str) -> str:
    """Return a name that no other process has, now or later."""
    return f"{name}-{secrets.token_hex(4)}"


class Stopped(Exception):
    """The node was told to stop before it had started."""


@asynccontextmanager
async def broker(settings: NodeSettings, *, name: str, stop: asyncio.Event) -> AsyncIterator[Bus]:
    """Connect for the length of a block, waiting for the broker as long as it takes.

    Raises Stopped when told to stop meanwhile.
    """
    connecting = asyncio.create_task(connect(bus_settings(settings), name=name))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not connecting.done():
        connecting.cancel()
        raise Stopped
    bus = connecting.result()
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def admin_port(
    settings: NodeSettings,
    tier: str,
    readiness: Callable[[], Readiness],
    readings: Sequence[Reading],
    routes: Sequence[BaseRoute] = (),
) -> AsyncIterator[Serving]:
    """Serve /healthz, /readyz, /metrics and a tier's own `routes` for the length of a block."""
    app = admin_app(readiness, registry_of(tier, readings), routes)
    serving = await serve(app, host=settings.admin_host, port=settings.admin_port)
    try:
        yield serving
    finally:
        await serving.close()
