"""The broker goes and comes back: what clients are told meanwhile, and that all heals by itself."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from headrace import topology
from ingress.dispatch import ACCEPT_TIMEOUT_S
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, collect, hook, refusal, stream
from tests.pipeline.conftest import Mode, Node, front, models_at, worker
from tests.servers import NatsServer, answers, wait_ready
from tests.waiting import wait_for


@dataclass
class Small:
    """A system whose broker may be stopped."""

    nats: NatsServer
    door: Node
    front: tuple[Node, ...]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.door.url, timeout=60, follow_redirects=True)

    def ready(self) -> bool:
        return all(answers(f"{node.admin_url}/readyz") for node in self.front)

    def wait_ready(self) -> None:
        """Wait until all have found the broker again."""
        wait_for(self.ready, within_s=15, what="readiness 200")


@pytest.fixture(scope="module")
def small(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    folder = tmp_path_factory.mktemp("small")
    nats = NatsServer(folder)
    # The tiers may start before their broker and before its streams.
    modules = ["gateway"] if mode == "gateway" else ["ingress", "streamer"]
    fronts = tuple(front(module, nats.url, folder) for module in modules)
    only = worker("worker", nats.url, folder)
    try:
        nats.start()
        with_bus(nats.url, topology.apply)
        for each in (*fronts, only):
            wait_ready(each.process, each.admin_url)
        found = Small(nats, fronts[0], fronts)
        wait_for(lambda: "sim" in models_at(found.door.url), within_s=15, what="the model")
        yield found
        for each in (*fronts, only):
            assert each.process.alive, each.process.said()[-4000:]
    finally:
        for each in (only, *fronts):
            each.process.terminate()
        for each in (only, *fronts):
            assert each.process.stop() == 0, each.process.said()[-4000:]
        nats.stop()


def test_tiers_that_start_before_their_broker_serve_once_it_is_there(small: Small) -> None:
    with small.client() as client:
        assert collect(client, chat(sim=hook("a")))["choices"][0]["message"]["content"] == "a"


def test_while_the_broker_is_away_requests_are_503_at_once_and_it_heals(small: Small) -> None:
    with small.client() as client:
        small.nats.stop()
        wait_for(lambda: not small.ready(), within_s=15, what="readiness 503")
        assert answers(f"{small.door.admin_url}/healthz")
        for _ in range(5):
            begun_s = time.monotonic()
            answer = client.post(CHAT, json=chat())
            assert time.monotonic() - begun_s < ACCEPT_TIMEOUT_S / 2  # nothing was waited for
            assert answer.status_code == 503
            assert refusal(answer)["code"] == "broker_unavailable"
            assert int(answer.headers["retry-after"]) >= 1
        small.nats.start()
        small.wait_ready()
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(collect, client, chat(sim=hook("b")))
            wait_for(asked.done, within_s=15, what="an answer")
        assert asked.result()["choices"][0]["message"]["content"] == "b"


@pytest.mark.slow
def test_a_broker_restarted_in_the_middle_of_a_stream_loses_and_repeats_nothing(
    small: Small,
) -> None:
    pieces = [f"<{number}>" for number in range(150)]
    body = chat("restart", stream=True, sim=hook(*pieces, itl_ms=20))
    with small.client() as client, client.stream("POST", CHAT, json=body) as answer:
        raw = b""
        for part in answer.iter_raw():
            if raw.count(b"data:") < 10 <= (raw + part).count(b"data:"):
                small.nats.stop()
                small.nats.start()
            raw += part
        text = raw.decode()
    found = [piece for piece in pieces if text.count(piece) == 1]
    assert found == pieces
    assert sorted(pieces, key=text.index) == pieces
    assert text.endswith("data: [DONE]\n\n")
    small.wait_ready()  # the stream's own node may be back before the one that takes requests
    with small.client() as client:
        assert stream(client, chat(sim=hook("after"))).text() == "after"
