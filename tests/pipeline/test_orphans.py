"""A gateway is killed with its clients' streams: what nobody comes back for ends, what somebody
resumes at another gateway goes on, and a broker that was away is no reason to end anything."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import topology
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import Node, front, models_at, page, worker
from tests.servers import NatsServer, wait_ready
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

PATIENCE_S = 8.0
ENDS_WITHIN_S = PATIENCE_S * 2 + 10
PIECES = [f"<{number}>" for number in range(300)]
LONG = hook(*PIECES, itl_ms=80, ttft_ms=0)  # 24 seconds: longer than the broker is away
ENDLESS = hook(*PIECES, itl_ms=1000, ttft_ms=0)
SLOTS = 4
FEW_SLOTS = f'{{"max_num_seqs": {SLOTS}}}'


class Cluster:
    """A broker, two gateways, and workers of a short patience: `sim`, and `tiny` of few slots."""

    def __init__(self, folder: Path, cleanup: ExitStack) -> None:
        self.nats = NatsServer(folder)
        cleanup.callback(self.nats.stop)
        self.nats.start()
        with_bus(self.nats.url, topology.apply)
        patience = ("--orphan-s", str(PATIENCE_S))
        tiny = ("--served-model-name", "tiny", "--engine-args", FEW_SLOTS)
        self.workers = (
            worker("worker", self.nats.url, folder, *patience),
            worker("tiny", self.nats.url, folder, *patience, *tiny),
        )
        self.stays = front("gateway", self.nats.url, folder, name="stays")
        self.dies = front("gateway", self.nats.url, folder, name="dies")
        for each in (*self.workers, self.stays, self.dies):
            cleanup.callback(each.process.kill)
        for each in (*self.workers, self.stays, self.dies):
            wait_ready(each.process, each.admin_url)
        for each in (self.stays, self.dies):
            self._wait_models(each)

    def _wait_models(self, gateway: Node) -> None:
        wait_for(lambda: {"sim", "tiny"} <= set(models_at(gateway.url)), within_s=15, what="models")

    def ledger(self, request: str) -> dict[str, int]:
        """Return what the engines did for a request."""
        found = {"starts": 0, "aborts": 0, "tokens": 0}
        for each in self.workers:
            entry = json.loads(page(f"{each.admin_url}/sim/requests")).get(request, {})
            found = {name: count + entry.get(name, 0) for name, count in found.items()}
        return found

    def made(self) -> int:
        """Return how many tokens the engines have made."""
        pages = (page(f"{each.admin_url}/sim/requests") for each in self.workers)
        return sum(entry["tokens"] for found in pages for entry in json.loads(found).values())

    def counted(self, name: str) -> float:
        """Return a metric of all workers together."""
        return sum(each.metrics()[name] for each in self.workers)

    @contextmanager
    def reading(self, gateway: Node, body: dict[str, Any]) -> Iterator[str]:
        """Hold a stream open at a gateway, its headers read; give its request id."""
        with (
            httpx.Client(base_url=gateway.url, timeout=30, verify=False) as client,
            client.stream("POST", CHAT, json=body | {"stream": True}) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            yield answer.headers["x-request-id"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as cleanup:
        yield Cluster(tmp_path, cleanup)


def test_of_a_killed_gateways_requests_only_those_that_somebody_wants_run_on(
    cluster: Cluster,
) -> None:
    kept = chat("kept", sim=LONG, on_disconnect="continue")
    with ExitStack() as streams:
        begun = [
            streams.enter_context(cluster.reading(cluster.dies, body))
            for body in (chat("lost", sim=ENDLESS), chat("resumed", sim=LONG), kept)
        ]
        lost, resumed, alone = begun
        for request in begun:
            wait_for(
                lambda request=request: cluster.ledger(request)["tokens"] > 0,
                within_s=15,
                what="some tokens",
            )
        cluster.dies.process.kill()
    url = f"{cluster.stays.url}/v1/streams/{resumed}"
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(httpx.get(url, timeout=60).text))
    reader.start()
    wait_for(lambda: cluster.ledger(lost)["aborts"] == 1, within_s=ENDS_WITHIN_S, what="an abort")
    assert cluster.ledger(lost)["tokens"] < len(PIECES)
    reader.join()
    assert [piece for piece in PIECES if texts[0].count(piece) == 1] == PIECES
    assert texts[0].endswith("data: [DONE]\n\n")
    whole = {"starts": 1, "aborts": 0, "tokens": len(PIECES)}
    wait_for(lambda: cluster.ledger(alone) == whole, within_s=30, what="the end of the kept one")
    assert cluster.ledger(resumed) == whole
    orphaned = "headrace_worker_requests_orphaned_total"
    wait_for(lambda: cluster.counted(orphaned) == 1, within_s=15, what="an orphan")


def test_what_a_killed_gateway_left_in_the_queue_never_reaches_an_engine(cluster: Cluster) -> None:
    busy = chat("busy", model="tiny", sim=ENDLESS)
    waits = chat("waits", model="tiny", sim=hook("never"))
    with ExitStack() as streams:
        run = [streams.enter_context(cluster.reading(cluster.stays, busy)) for _ in range(SLOTS)]
        for request in run:
            wait_for(
                lambda request=request: cluster.ledger(request)["starts"] == 1,
                within_s=15,
                what="a start",
            )
        with ExitStack() as dying:  # as many may wait in the queue as run
            left = [dying.enter_context(cluster.reading(cluster.dies, waits)) for _ in run]
            cluster.dies.process.kill()
        wait_for(lambda: _queued(cluster) == SLOTS, within_s=ENDS_WITHIN_S, what="an emptier queue")
        assert [cluster.ledger(request)["starts"] for request in left] == [0] * SLOTS
        assert [cluster.ledger(request)["aborts"] for request in run] == [0] * SLOTS


def _queued(cluster: Cluster) -> int:
    async def count(bus: Any) -> int:
        info = await bus.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
        return sum((info["state"].get("subjects") or {}).values())

    return with_bus(cluster.nats.url, count)


def test_a_broker_away_for_longer_than_the_patience_ends_no_request(cluster: Cluster) -> None:
    texts: list[str] = []

    def ask() -> None:
        with httpx.Client(base_url=cluster.stays.url, timeout=60, verify=False) as client:
            texts.append(client.post(CHAT, json=chat("outage", stream=True, sim=LONG)).text)

    reader = threading.Thread(target=ask)
    reader.start()
    wait_for(lambda: cluster.made() > 0, within_s=15, what="a request that runs")
    cluster.nats.stop()
    back_s = time.monotonic() + 2 * PATIENCE_S
    wait_for(lambda: time.monotonic() > back_s, within_s=3 * PATIENCE_S, what="a long absence")
    cluster.nats.start()
    reader.join()
    assert [piece for piece in PIECES if texts[0].count(piece) == 1] == PIECES
    assert texts[0].endswith("data: [DONE]\n\n")
    assert cluster.counted("headrace_worker_requests_orphaned_total") == 0
