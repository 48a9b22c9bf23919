"""What the tests of the operators' commands share: a broker with nothing of ours running on it."""

from collections.abc import Iterator

import pytest

from headrace import topology
from headrace.bus import Bus
from tests.broker import with_bus
from tests.queue import ODD_MODEL, PARTITIONS
from tests.servers import NatsServer


@pytest.fixture(scope="session")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the topology and the consumers of two models."""
    found = NatsServer(tmp_path_factory.mktemp("queue"))
    found.start()
    yield found.url
    found.stop()


@pytest.fixture
def url(queue_server: str) -> str:
    """That server, its queue and replies empty, its consumers as new."""

    async def renew(bus: Bus) -> None:
        for stream in (await bus.api("STREAM.NAMES"))["streams"] or ():
            await bus.api(f"STREAM.DELETE.{stream}")
        # A busy server may find files of the deleted stream, which it removes late.
        for stream in await topology.apply(bus):
            await bus.purge(stream, ">")
        await topology.apply_model(bus, "m", partitions=PARTITIONS)
        await topology.apply_model(bus, ODD_MODEL, partitions=2)

    with_bus(queue_server, renew)
    return queue_server
