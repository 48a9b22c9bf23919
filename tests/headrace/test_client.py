"""nats-py's client as mended: it moves on from what is dead, and sends nothing late."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headrace.bus import Bus, BusSettings, connection
from headrace.client import login
from tests.broker import with_bus
from tests.servers import NatsServer, freeze
from tests.waiting import until

CHUNK = b"x" * 500_000
CHUNKS = 40
"""More than the kernel takes for a reader that does not read."""


async def _kept(bus: Bus) -> int:
    return int((await bus.api("STREAM.INFO.kept"))["state"]["messages"])


async def _make_stream(bus: Bus) -> None:
    await bus.api("STREAM.CREATE.kept", {"name": "kept", "subjects": ["kept"], "storage": "file"})


@pytest.mark.slow
def test_a_connection_with_bytes_unsent_moves_from_a_frozen_server_to_another(
    own_nats: NatsServer, tmp_path: Path
) -> None:
    other = NatsServer(tmp_path / "other")
    (tmp_path / "other").mkdir()

    async def test() -> None:
        urls = f"{own_nats.url}, {other.url}"
        async with connection(BusSettings(urls), name="test", timeout_s=15) as bus:
            moved: list[str] = []

            async def found() -> None:
                moved.append("to the other")

            bus.on_reconnect(found)
            freeze(own_nats.pid)
            try:
                await asyncio.gather(*(bus.publish("kept", CHUNK) for _ in range(CHUNKS)))
                await asyncio.to_thread(other.start)
                await until(lambda: moved, within_s=60)
                await bus.api("INFO")
            finally:
                os.kill(own_nats.pid, signal.SIGCONT)

    try:
        asyncio.run(test())
    finally:
        other.stop()


def test_what_was_not_sent_before_the_connection_broke_is_not_sent_after(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        await _make_stream(bus)
        freeze(own_nats.pid)
        for _ in range(CHUNKS):
            await bus.publish("kept", CHUNK)
        await asyncio.to_thread(own_nats.kill)
        await until(lambda: not bus.connected)
        await asyncio.to_thread(own_nats.start)
        await until(lambda: bus.connected)
        await bus.store("kept", b"after")
        assert await _kept(bus) == 1

    with_bus(own_nats.url, test)


def test_an_error_that_the_server_names_breaks_the_connection_for_a_moment_only(
    nats_url: str,
) -> None:
    async def test(bus: Bus) -> None:
        returned: list[str] = []

        async def back() -> None:
            returned.append("back")

        bus.on_reconnect(back)
        bus._client._max_payload = 100 * 1024 * 1024  # as if the server's limit had been lowered
        await bus.publish("large", b"x" * 2 * 1024 * 1024)
        await until(lambda: returned)
        await bus.api("INFO")

    with_bus(nats_url, test)


def test_servers_that_a_cluster_tells_of_get_the_login_of_those_that_were_named() -> None:
    assert login(["nats://u:p@a:1", "nats://b:2"]) == {"user": "u", "password": "p"}
    assert login(["nats://token@a:1"]) == {"token": "token"}
    assert login(["nats://a:1"]) == {}
    assert login(["nats://u:p@a:1", "nats://v:q@b:2"]) == {}
