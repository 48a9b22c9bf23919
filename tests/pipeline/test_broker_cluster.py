"""Three nats-servers, three copies of all: leaders move and die under running streams."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from headrace.bus import BrokerAway, BrokerRefused
from tests.cluster import NatsCluster
from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.faulty import TRIES, Faulty, River, river, running, started_once, whole
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow

PIECES = [f"{number} " for number in range(200)]
STREAMS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> NatsCluster:
    return NatsCluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def faulty(cluster: NatsCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with running(cluster, "gateway", tmp_path_factory.mktemp("cluster"), replicas=3) as found:
        yield found


async def _rivers(faulty: Faulty, *faults: Callable[[], Awaitable[None]]) -> list[River]:
    """Read streams while faults happen, one after another."""
    await asyncio.to_thread(faulty.wait_ready)  # who is not would refuse a request
    begun = asyncio.Semaphore(0)
    async with faulty.async_client() as client:
        tasks = [
            asyncio.create_task(river(client, f"river {n}", PIECES, itl_ms=25, begun=begun))
            for n in range(STREAMS)
        ]
        for _ in range(STREAMS):
            await begun.acquire()
        for fault in faults:
            await fault()
        return await asyncio.gather(*tasks)


def _step_down(faulty: Faulty, verb: str) -> Callable[[], Awaitable[None]]:
    async def fault() -> None:
        await asyncio.to_thread(faulty.api, verb)

    return fault


def _leader(faulty: Faulty, stream: str) -> str | None:
    """Return who leads a stream, None while nobody does."""
    try:
        leader = faulty.api(f"STREAM.INFO.{stream}")["cluster"].get("leader")
    except (BrokerAway, BrokerRefused):
        return None
    return None if leader is None else str(leader)


def _consumers(faulty: Faulty) -> list[str]:
    return list(faulty.api("CONSUMER.NAMES.REQUESTS")["consumers"])


def _assert_whole(rivers: list[River]) -> None:
    assert [each.error for each in rivers] == [None] * STREAMS
    assert [each.seen for each in rivers] == [whole(PIECES)] * STREAMS


def test_everything_has_three_copies(faulty: Faulty) -> None:
    for stream in ("REQUESTS", "REPLIES", "KV_workers", "OBJ_blobs"):
        assert faulty.api(f"STREAM.INFO.{stream}")["config"]["num_replicas"] == 3
    for name in _consumers(faulty)[:4]:
        cluster = faulty.api(f"CONSUMER.INFO.REQUESTS.{name}")["cluster"]
        assert len(cluster["replicas"]) == 2


@pytest.mark.parametrize("stream", ["REQUESTS", "REPLIES"])
def test_streams_are_whole_and_started_once_when_a_streams_leader_steps_down(
    faulty: Faulty, stream: str
) -> None:
    fault = _step_down(faulty, f"STREAM.LEADER.STEPDOWN.{stream}")
    assert any(
        started_once(faulty, asyncio.run(_rivers(faulty, fault)), PIECES) for _ in range(TRIES)
    )


def test_streams_are_whole_and_started_once_when_consumers_leaders_step_down(
    faulty: Faulty,
) -> None:
    online = [name for name in _consumers(faulty) if name.startswith("online")]
    faults = [_step_down(faulty, f"CONSUMER.LEADER.STEPDOWN.REQUESTS.{name}") for name in online]
    assert any(
        started_once(faulty, asyncio.run(_rivers(faulty, *faults)), PIECES) for _ in range(TRIES)
    )


@pytest.mark.parametrize("stream", ["REQUESTS", "REPLIES"])
def test_streams_are_whole_when_a_streams_leader_is_killed(
    faulty: Faulty, cluster: NatsCluster, stream: str
) -> None:
    killed: list[int] = []

    async def kill() -> None:
        leader = await until(lambda: asyncio.to_thread(_leader, faulty, stream))
        killed.append(cluster.kill(leader))

    try:
        rivers = asyncio.run(_rivers(faulty, kill))
        _assert_whole(rivers)
        assert max(faulty.starts(each.request) for each in rivers) <= 2
        faulty.wait_at_rest(within_s=20)

        def served() -> bool:
            with faulty.client() as client:
                return client.post(CHAT, json=chat(sim=hook("two"))).status_code == 200

        wait_for(served, within_s=15, what="an answer from two servers of three")
    finally:
        for number in killed:
            cluster.start_one(number)

    def complete() -> bool:
        try:
            followers = faulty.api(f"STREAM.INFO.{stream}")["cluster"].get("replicas") or []
        except (BrokerAway, BrokerRefused):  # there is no leader yet
            return False
        return sum(bool(each.get("current")) for each in followers) == 2

    wait_for(complete, within_s=30, what="the third server to catch up")
