"""A consumer, stream, bucket or file deleted under a running system is made again by itself."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from schemas import subjects
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, collect, hook
from tests.pipeline.conftest import Mode, front
from tests.pipeline.faulty import TRIES, Faulty, River, river, running, started_once
from tests.servers import NatsServer, wait_ready
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow

PIECES = [f"{number} " for number in range(100)]
ENDLESS = [f"{number} " for number in range(2000)]
STREAMS = 12
STREAM_NAMES = [
    *("REQUESTS", "REPLIES", "DEADLETTERS", "OBJ_blobs"),
    *("KV_workers", "KV_streamers", "KV_models", "KV_secrets", "KV_responses"),
    *("KV_limits", "KV_tenants"),
]


@pytest.fixture(scope="module")
def nats(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> NatsServer:
    return NatsServer(tmp_path_factory.mktemp("deletions"))


@pytest.fixture(scope="module")
def faulty(
    mode: Mode, nats: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulty]:
    args = ("--engine-args", '{"max_num_seqs": 16}')
    with running(nats, mode, tmp_path_factory.mktemp("deletions"), *args) as found:
        yield found


def _names(faulty: Faulty) -> set[str]:
    return set(faulty.api("STREAM.NAMES")["streams"])


def _consumers(faulty: Faulty) -> list[str]:
    found = faulty.api("CONSUMER.NAMES.REQUESTS")
    return sorted(found["consumers"] or [])


def _queued(faulty: Faulty) -> int:
    return int(faulty.api("STREAM.INFO.REQUESTS")["state"]["messages"])


def _says(faulty: Faulty, text: str) -> str:
    with faulty.client() as client:
        found = collect(client, chat(text, sim=hook(text)))
    return str(found["choices"][0]["message"]["content"])


def _deleted(faulty: Faulty, stream: str) -> None:
    created = faulty.api(f"STREAM.INFO.{stream}")["created"]
    faulty.api(f"STREAM.DELETE.{stream}")

    def made_again() -> bool:
        if stream not in _names(faulty):
            return False
        return bool(faulty.api(f"STREAM.INFO.{stream}")["created"] != created)

    wait_for(made_again, within_s=15, what=f"{stream} made again")


def test_consumers_deleted_while_idle_are_made_again(faulty: Faulty) -> None:
    before = _consumers(faulty)
    assert len(before) == 64
    for name in before:
        faulty.api(f"CONSUMER.DELETE.REQUESTS.{name}")
    wait_for(lambda: _consumers(faulty) == before, within_s=15, what="all consumers")
    assert [_says(faulty, f"{n}") for n in range(20)] == [f"{n}" for n in range(20)]


async def _rivers(faulty: Faulty, *deleted: str) -> list[River]:
    """Read streams while something is deleted by a JetStream call."""
    await asyncio.to_thread(faulty.wait_ready)  # who is not would refuse a request
    begun = asyncio.Semaphore(0)
    async with faulty.async_client() as client:
        tasks = [
            asyncio.create_task(river(client, f"river {n}", PIECES, itl_ms=25, begun=begun))
            for n in range(STREAMS)
        ]
        for _ in range(STREAMS):
            await begun.acquire()
        for verb in deleted:
            await asyncio.to_thread(faulty.api, verb)
        return await asyncio.gather(*tasks)


def test_consumers_deleted_while_requests_run_repeat_and_lose_nothing(faulty: Faulty) -> None:
    deletions = [f"CONSUMER.DELETE.REQUESTS.{name}" for name in _consumers(faulty)]

    def are_back() -> bool:
        return {f"CONSUMER.DELETE.REQUESTS.{name}" for name in _consumers(faulty)} == {*deletions}

    def scenario() -> bool:
        wait_for(are_back, within_s=15, what="all consumers")
        return started_once(faulty, asyncio.run(_rivers(faulty, *deletions)), PIECES)

    assert any(scenario() for _ in range(TRIES))


@pytest.mark.parametrize("stream", ["REQUESTS", "REPLIES"])
def test_streams_go_on_when_the_queue_or_the_log_is_deleted_under_them(
    faulty: Faulty, stream: str
) -> None:
    assert any(
        started_once(faulty, asyncio.run(_rivers(faulty, f"STREAM.DELETE.{stream}")), PIECES)
        for _ in range(TRIES)
    )
    faulty.wait_ready()
    assert _says(faulty, "after") == "after"
    wait_for(lambda: _queued(faulty) == 0, within_s=15, what="an empty queue")


@pytest.mark.parametrize("stream", STREAM_NAMES)
def test_a_stream_deleted_while_idle_is_made_again_as_it_was(faulty: Faulty, stream: str) -> None:
    before = faulty.api(f"STREAM.INFO.{stream}")["config"]
    _deleted(faulty, stream)
    after = faulty.api(f"STREAM.INFO.{stream}")["config"]
    after.pop("first_seq", None)
    before.pop("first_seq", None)
    assert after == before
    faulty.wait_ready()
    assert _says(faulty, "after") == "after"


class Flows:
    """Streams without an end, whose clients leave when told to."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self.leave = asyncio.Event()
        self.came: list[int] = []
        """A number for each token that came: whose it is."""

    async def read(self, client: httpx.AsyncClient, number: int) -> River:
        body = chat(f"q {number}", stream=True, sim=hook(*ENDLESS, itl_ms=100, ttft_ms=0))
        seen: list[str] = []
        async with client.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            request = answer.headers["x-request-id"]
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return River(request, seen, chunk["error"])
                seen.append(chunk["choices"][0]["delta"]["content"])
                self.came.append(number)
                if len(seen) == 5:
                    self.begun.release()
                if self.leave.is_set() and len(seen) >= 5:
                    break
        return River(request, seen, None)


def test_clients_of_a_deleted_queue_are_told_and_what_runs_goes_on(faulty: Faulty) -> None:
    async def run() -> tuple[list[River], list[int]]:
        flows = Flows()
        # 2 workers run 16 each and hold 4 more each; the others wait in the queue, which takes 64.
        async with faulty.async_client(timeout_s=90) as client:
            tasks = [asyncio.create_task(flows.read(client, n)) for n in range(54)]
            for _ in range(32):
                await flows.begun.acquire()
            running = set(flows.came)
            plain = [
                asyncio.create_task(client.post(CHAT, json=chat(f"p {n}", sim=hook("late"))))
                for n in range(5)
            ]
            await until(lambda: asyncio.to_thread(lambda: _queued(faulty) == 59), within_s=30)
            await asyncio.to_thread(faulty.api, "STREAM.DELETE.REQUESTS")
            await asyncio.wait(plain, return_when=asyncio.FIRST_COMPLETED)
            flows.came.clear()
            await until(lambda: all(flows.came.count(n) >= 10 for n in running))
            flows.leave.set()
            rivers = await asyncio.gather(*tasks)
            return rivers, [(await each).status_code for each in plain]

    rivers, statuses = asyncio.run(run())
    went_on = [each for each in rivers if each.error is None]
    told = [each for each in rivers if each.error is not None]
    assert [each.seen for each in went_on] == [ENDLESS[: len(each.seen)] for each in went_on]
    assert len(went_on) >= 32
    assert {str(each.error["code"]) for each in told if each.error} == {"broker_unavailable"}
    assert set(statuses) <= {200, 503}
    assert 503 in statuses
    faulty.wait_at_rest()
    assert _says(faulty, "after") == "after"


def test_deleted_tokenizer_files_are_put_back_and_serve_a_gateway_that_starts_then(
    faulty: Faulty, mode: Mode
) -> None:
    blobs = subjects.BLOBS
    files: dict[str, int] = {}

    def are_there() -> bool:
        entries = faulty.api(f"STREAM.INFO.OBJ_{blobs}", {"subjects_filter": f"$O.{blobs}.M.>"})
        files.update(entries["state"].get("subjects") or {})
        return bool(files)

    wait_for(are_there, within_s=15, what="the files")  # also after the stream was deleted

    async def purge(bus: object) -> None:
        for name in files:
            await bus.purge(f"OBJ_{blobs}", name)  # type: ignore[attr-defined]

    with_bus(faulty.nats_url, purge)
    module = "gateway" if mode == "gateway" else "ingress"
    second = front(module, faulty.nats_url, faulty.folder, name="second")
    try:
        wait_ready(second.process, second.admin_url)

        def serves() -> bool:
            body = chat(sim=hook("new"))
            with httpx.Client(timeout=20, follow_redirects=True, verify=False) as client:
                return client.post(second.url + CHAT, json=body).status_code == 200

        wait_for(serves, within_s=15, what="the second node to serve the model")
    finally:
        second.process.stop()
