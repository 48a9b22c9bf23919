"""A broker that is killed, frozen or away for long: nothing is lost, repeated or started twice."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace import registry
from headrace.bus import BusSettings, connection
from ingress.dispatch import ACCEPT_TIMEOUT_S
from tests.pipeline.asking import CHAT, chat, collect, hook, refusal
from tests.pipeline.conftest import Mode, worker
from tests.pipeline.faulty import TRIES, Faulty, River, river, running, started_once, whole
from tests.servers import NatsServer, wait_ready
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

STREAMS = 40
PIECES = [f"{number} " for number in range(150)]


@pytest.fixture(scope="module")
def nats(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> NatsServer:
    return NatsServer(tmp_path_factory.mktemp("faulty"))


@pytest.fixture(scope="module")
def faulty(
    mode: Mode, nats: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulty]:
    with running(nats, mode, tmp_path_factory.mktemp("faulty")) as found:
        yield found


def _served(faulty: Faulty) -> bool:
    with faulty.client() as client:
        return client.post(CHAT, json=chat(sim=hook("a"))).status_code == 200


def test_a_broker_killed_while_idle_serves_a_request_within_5_s_of_its_return(
    faulty: Faulty, nats: NatsServer
) -> None:
    nats.kill()
    wait_for(lambda: not faulty.ready(), within_s=15, what="readiness 503")
    nats.start()
    wait_for(lambda: _served(faulty), within_s=5, what="an answer")


async def _rivers(faulty: Faulty, nats: NatsServer, *, away_s: float) -> list[River]:
    """Read streams while the broker is killed, is away, and comes back."""
    await asyncio.to_thread(faulty.wait_ready)  # who is not would refuse a request
    begun = asyncio.Semaphore(0)
    async with faulty.async_client() as client:
        tasks = [
            asyncio.create_task(river(client, f"river {n}", PIECES, itl_ms=20, begun=begun))
            for n in range(STREAMS)
        ]
        for _ in range(STREAMS):
            await begun.acquire()
        nats.kill()
        await asyncio.sleep(away_s)
        await asyncio.to_thread(nats.start)
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize("away_s", [0.0, 2.0, 8.0])
def test_streams_survive_a_killed_broker_token_by_token_and_none_is_started_twice(
    faulty: Faulty, nats: NatsServer, away_s: float
) -> None:
    assert any(
        started_once(faulty, asyncio.run(_rivers(faulty, nats, away_s=away_s)), PIECES)
        for _ in range(TRIES)
    )


def test_a_broker_away_for_long_is_503_at_once_and_its_streams_go_on(
    faulty: Faulty, nats: NatsServer
) -> None:
    async def run() -> list[River]:
        await asyncio.to_thread(faulty.wait_ready)
        begun = asyncio.Semaphore(0)
        async with faulty.async_client(timeout_s=90) as client:
            tasks = [
                asyncio.create_task(river(client, f"long {n}", PIECES, itl_ms=200, begun=begun))
                for n in range(10)
            ]
            for _ in range(10):
                await begun.acquire()
            nats.kill()
            await asyncio.to_thread(
                wait_for, lambda: not faulty.ready(), within_s=15, what="readiness 503"
            )
            for _ in range(20):
                begun_s = time.monotonic()
                answer = await client.post(CHAT, json=chat())
                assert time.monotonic() - begun_s < ACCEPT_TIMEOUT_S / 2
                assert answer.status_code == 503
                assert refusal(answer)["code"] == "broker_unavailable"
                assert int(answer.headers["retry-after"]) >= 1
                await asyncio.sleep(1)
            await asyncio.to_thread(nats.start)
            return await asyncio.gather(*tasks)

    assert any(started_once(faulty, asyncio.run(run()), PIECES) for _ in range(TRIES))
    faulty.wait_ready()


def test_a_frozen_broker_is_noticed_within_10_s_and_streams_go_on_when_it_thaws(
    faulty: Faulty, nats: NatsServer
) -> None:
    async def run() -> list[River]:
        begun = asyncio.Semaphore(0)
        async with faulty.async_client(timeout_s=90) as client:
            tasks = [
                asyncio.create_task(river(client, f"cold {n}", PIECES, itl_ms=50, begun=begun))
                for n in range(10)
            ]
            for _ in range(10):
                await begun.acquire()
            os.kill(nats.pid, signal.SIGSTOP)
            try:
                await asyncio.to_thread(
                    wait_for, lambda: not faulty.ready(), within_s=10, what="readiness 503"
                )
                answer = await client.post(CHAT, json=chat())
                assert refusal(answer)["code"] == "broker_unavailable"
            finally:
                os.kill(nats.pid, signal.SIGCONT)
            return await asyncio.gather(*tasks)

    rivers = asyncio.run(run())
    assert [each.seen for each in rivers] == [whole(PIECES)] * 10
    faulty.wait_ready()
    faulty.wait_at_rest()


def test_the_log_tells_of_an_outage_once_per_process(faulty: Faulty, nats: NatsServer) -> None:
    def told() -> dict[str, int]:
        return {n.name: n.process.said().count("the broker is away") for n in faulty.nodes}

    once = {name: count + 1 for name, count in told().items()}
    nats.kill()
    wait_for(lambda: not faulty.ready(), within_s=15, what="readiness 503")
    wait_for(lambda: told() == once, within_s=15, what=lambda: f"a line of each: {told()}")
    lines = faulty.said().count("\n")
    nats.start()
    faulty.wait_ready()
    assert told() == once
    assert faulty.said().count("\n") - lines < 5 * len(faulty.nodes)


def test_a_client_that_leaves_while_the_broker_is_away_frees_its_slot_on_the_return(
    faulty: Faulty, nats: NatsServer
) -> None:
    pieces = [f"{n} " for n in range(10_000)]
    with faulty.client() as client:
        body = chat("left alone", stream=True, sim=hook(*pieces, itl_ms=20))
        with client.stream("POST", CHAT, json=body) as answer:
            parts = answer.iter_raw()  # held: its end would be the client's leaving
            next(parts)
            nats.kill()
            wait_for(lambda: not faulty.ready(), within_s=15, what="readiness 503")
    nats.start()
    faulty.wait_ready()
    faulty.wait_at_rest()


def test_what_is_queued_without_a_worker_survives_a_killed_broker(
    mode: Mode, tmp_path: Path
) -> None:
    nats = NatsServer(tmp_path)
    with running(nats, mode, tmp_path, workers=1) as faulty:
        [first] = faulty.workers
        first.process.stop()
        asyncio.run(_queued(faulty, nats))


async def _queued(faulty: Faulty, nats: NatsServer) -> None:
    texts = [f"answer {n}" for n in range(50)]

    async def ask(client: httpx.AsyncClient, text: str) -> str:
        answer = await client.post(CHAT, json=chat(text, sim=hook(text)))
        return str(answer.json()["choices"][0]["message"]["content"])

    def queued() -> bool:
        return int(faulty.api("STREAM.INFO.REQUESTS")["state"]["messages"]) == 50

    async with (
        connection(BusSettings(nats.url), name="card") as bus,
        faulty.async_client(timeout_s=120) as client,
    ):
        card = await registry.read_card(bus, "sim")
        assert card is not None
        keeper = asyncio.create_task(registry.keep_alive(bus, card))
        tasks = [asyncio.create_task(ask(client, text)) for text in texts]
        await asyncio.to_thread(wait_for, queued, within_s=30, what="50 in the queue")
        nats.kill()
        await asyncio.to_thread(nats.start)
        await asyncio.to_thread(wait_for, faulty.ready, within_s=15, what="readiness 200")
        late = await asyncio.to_thread(worker, "late", faulty.nats_url, faulty.folder)
        try:
            await asyncio.to_thread(wait_ready, late.process, late.admin_url)
            assert await asyncio.gather(*tasks) == texts
            assert await asyncio.to_thread(collect_one, faulty) == "after"
        finally:
            keeper.cancel()
            await asyncio.to_thread(late.process.stop)


def collect_one(faulty: Faulty) -> str:
    with faulty.client() as client:
        found = collect(client, chat(sim=hook("after")))
    return str(found["choices"][0]["message"]["content"])
