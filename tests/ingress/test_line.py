"""The line before the queue: what it was told of ended requests is not lost with it, and what it
knows of a tenant's limits holds nobody up."""

import asyncio
import os
import signal
import time
from collections.abc import Iterable

import msgspec
import pytest

import ingress.line
from headrace import topology, versioned
from headrace.bus import Bus, BusSettings, connection
from headrace.settle import settle
from headrace.tenant_settings import Tenancy
from headrace.tenants import Directory
from headrace.workforce import Workforce
from ingress.limits import Account
from ingress.line import Line
from ingress.ratelimit import headers_of, ratelimit_headers
from schemas import subjects
from schemas.subjects import Settlement, new_request_id
from schemas.tenant import Tenant
from tests.broker import with_bus
from tests.servers import NatsServer, freeze


def _line(bus: Bus, tenants: Iterable[str]) -> Line:
    """Return a line before which each of the tenants may have nine requests open."""
    terms = {
        name: Tenant(name=name, concurrent_requests=9, requests_per_minute=100) for name in tenants
    }
    directory = Directory(tenancy=Tenancy(tenants=terms))
    return Line(bus, directory, Workforce(bus, clock=time.monotonic))


def test_a_node_that_stops_writes_the_settlements_that_came_to_it(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress.line, "STOP_S", 60.0)
    tenants = [f"stopped-{n}" for n in range(5)]

    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        async with connection(BusSettings(nats_url), name="ingress") as own:
            line = _line(own, tenants)
            await line.start()
            ended = []
            for tenant in tenants * 9:
                ended.append(Settlement(tenant, new_request_id(), "m", 1, 1))
                await line.reservations.reserve(
                    tenant, request=ended[-1].request, tokens=2, deadline_s=time.time() + 60
                )
            for settlement in ended:
                await settle(bus, settlement)
            await bus.api("INFO")  # the broker has them all
            await line.stop()
        for tenant in tenants:
            stored = await versioned.read(bus, subjects.LIMITS, tenant)
            assert msgspec.msgpack.decode(stored.data or b"", type=Account).open == {}

    with_bus(nats_url, run)


def test_no_refusal_waits_for_a_silent_broker_to_say_what_is_left(own_nats: NatsServer) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        line = _line(bus, ["refused"])
        standings = await line.reservations.standings("refused")
        assert "x-ratelimit-limit-requests" in headers_of(standings)
        freeze(own_nats.pid)
        try:
            unanswered = asyncio.create_task(bus.api("INFO", timeout_s=60))
            assert await ratelimit_headers(line, "refused") == {}
            assert not unanswered.done()
        finally:
            os.kill(own_nats.pid, signal.SIGCONT)
        await unanswered

    with_bus(own_nats.url, run)
