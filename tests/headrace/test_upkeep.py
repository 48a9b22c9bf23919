"""Streams that are deleted under a running node are made again as they were, and it is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from headrace import topology
from headrace.bus import Bus
from headrace.topology import Sizes
from headrace.upkeep import Upkeep
from schemas import subjects
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until


@asynccontextmanager
async def looking_after(bus: Bus, upkeep: Upkeep) -> AsyncIterator[None]:
    task = asyncio.create_task(upkeep.forever())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _seen_all(upkeep: Upkeep) -> None:
    await until(lambda: set(upkeep._configs) == set(topology.names()))


def test_a_stream_is_made_again_with_an_operators_own_sizes_and_its_owner_is_told(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus, Sizes(requests_max=7))
        upkeep = Upkeep(bus)
        told: list[str] = []

        async def remade() -> None:
            told.append("REQUESTS")

        upkeep.on_remade(subjects.REQUESTS, remade)
        async with looking_after(bus, upkeep):
            await _seen_all(upkeep)
            await bus.api("STREAM.DELETE.REQUESTS")
            await until(lambda: told)
            config = (await bus.api("STREAM.INFO.REQUESTS"))["config"]
        assert config["max_msgs"] == 7
        assert told == ["REQUESTS"]

    with_bus(own_nats.url, test)


@pytest.mark.slow
def test_attempts_go_on_rising_in_a_log_that_was_made_again(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        for _ in range(5):
            before = await bus.store("replies.s.t.r", b"")
        upkeep = Upkeep(bus)
        told: list[str] = []

        async def remade() -> None:
            told.append("REPLIES")

        upkeep.on_remade(subjects.REPLIES, remade)
        async with looking_after(bus, upkeep):
            await _seen_all(upkeep)
            for count in (1, 2):
                await bus.api("STREAM.DELETE.REPLIES")
                await until(lambda count=count: len(told) == count)  # type: ignore[misc]
                after = await bus.store("replies.s.t.r", b"")
                assert after.seq > before.seq
                before = after
        await topology.apply(bus)
        assert (await bus.store("replies.s.t.r", b"")).seq > before.seq

    with_bus(own_nats.url, test)


def test_a_node_is_not_ready_without_its_streams_and_is_once_they_are_applied(
    own_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bus: Bus) -> None:
        async with looking_after(bus, Upkeep(bus)):
            await until(lambda: not bus.ready)
            assert bus.connected
            assert "topology apply" in str(bus.fault)
            await topology.apply(bus)
            await until(lambda: bus.ready)

    with_bus(own_nats.url, test)
    assert sum("cannot be used" in record.message for record in caplog.records) == 1


def test_nodes_that_notice_at_once_make_one_stream(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        nodes = [Upkeep(bus) for _ in range(3)]
        told: list[int] = []

        def telling(number: int) -> None:
            async def remade() -> None:
                told.append(number)

            nodes[number].on_remade(subjects.REPLIES, remade)

        for number in range(3):
            telling(number)
        async with (
            looking_after(bus, nodes[0]),
            looking_after(bus, nodes[1]),
            looking_after(bus, nodes[2]),
        ):
            for node in nodes:
                await _seen_all(node)
            await bus.api("STREAM.DELETE.REPLIES")
            await until(lambda: sorted(told) == [0, 1, 2])
            await until(lambda: bus.ready)  # the last one's look may have yet to end

    with_bus(own_nats.url, test)
