"""The same Idempotency-Key after a death on the way: of the worker, and of the streamer."""

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.sse import COMMENT
from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import Node, System, front, models_at, worker
from tests.servers import wait_ready
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

PIECES = [f"{number} " for number in range(400)]


@pytest.fixture
def frail(system: System, tmp_path: Path) -> Iterator[tuple[str, Node]]:
    """A model that one worker serves, and that worker."""
    model = f"frail-{secrets.token_hex(4)}"
    found = worker("frail", system.nats_url, tmp_path, "--served-model-name", model)
    try:
        wait_ready(found.process, found.admin_url)
        wait_for(lambda: system.knows(model), within_s=15, what="the model")
        yield model, found
    finally:
        found.process.kill()


def test_a_client_whose_worker_died_retries_and_gets_the_same_answer_whole(
    system: System, frail: tuple[str, Node], tmp_path: Path
) -> None:
    model, victim = frail
    body = chat(model=model, stream=True, sim=hook(*PIECES, itl_ms=20, ttft_ms=0))
    key = {"Idempotency-Key": secrets.token_hex(8)}
    with system.client() as one, system.client() as two:
        first = one.send(one.build_request("POST", CHAT, json=body, headers=key), stream=True)
        parts = first.iter_raw()  # held: its end would be the client's leaving
        next(parts)
        os.kill(victim.process.pid, signal.SIGKILL)
        heir = worker("heir", system.nats_url, tmp_path, "--served-model-name", model)
        try:
            with two.stream("POST", CHAT, json=body, headers=key) as second:
                first.close()  # who comes back later than 0.6 s after it left asks for another
                second.read()
            third = two.post(CHAT, json=body, headers=key)
        finally:
            heir.process.stop()
    request = first.headers["x-request-id"]
    assert [a.headers["x-request-id"] for a in (second, third)] == [request] * 2
    assert second.content.replace(COMMENT, b"") == third.content  # in which it waited
    ids = [line for line in second.text.splitlines() if line.startswith("id: ")]
    assert ids == [f"id: {seq}" for seq in range(len(PIECES) + 1)]
    assert second.content.endswith(b"data: [DONE]\n\n")


def test_a_client_whose_door_died_retries_at_another_and_attaches(
    system: System, tmp_path: Path
) -> None:
    """A gateway is door and streamer in one; a second one stands beside what runs."""
    other = front("gateway", system.nats_url, tmp_path, name="doomed")
    body = chat(stream=True, sim=hook(*PIECES, itl_ms=20, ttft_ms=0))
    key = {"Idempotency-Key": secrets.token_hex(8)}
    try:
        wait_ready(other.process, other.admin_url)
        wait_for(lambda: "sim" in models_at(other.url), within_s=15, what="models")
        with system.client() as client:
            answer = client.send(
                client.build_request("POST", f"{other.url}{CHAT}", json=body, headers=key),
                stream=True,
            )
            request = answer.headers["x-request-id"]
            parts = answer.iter_raw()
            next(parts)
            other.process.kill()
            answer.close()
            again = client.post(CHAT, json=body, headers=key)
    finally:
        other.process.kill()
    assert again.headers["x-request-id"] == request
    assert again.content.endswith(b"data: [DONE]\n\n")
    assert system.ledger(request)["starts"] == 1
    system.wait_at_rest()
