"""The line before the queue: what it was told of ended requests is not lost with it."""

import time

import msgspec

from headrace import topology, versioned
from headrace.bus import Bus, BusSettings, connection
from headrace.settle import settle
from headrace.tenant_settings import Tenancy
from headrace.tenants import Directory
from headrace.workforce import Workforce
from ingress.limits import Account
from ingress.line import Line
from schemas import subjects
from schemas.subjects import Settlement, new_request_id
from schemas.tenant import Tenant
from tests.broker import with_bus


def test_a_node_that_stops_writes_the_settlements_that_came_to_it(nats_url: str) -> None:
    tenants = [f"stopped-{n}" for n in range(5)]

    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        terms = {name: Tenant(name=name, concurrent_requests=9) for name in tenants}
        workforce = Workforce(bus, clock=time.monotonic)
        async with connection(BusSettings(nats_url), name="ingress") as own:
            line = Line(own, Directory(tenancy=Tenancy(tenants=terms)), workforce)
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
