"""Deadlines, and models without a worker: what waits or runs too long ends, and says why."""

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from headrace import journal
from headrace.bus import Bus
from headrace.registry import load_files, publish_card, read_card
from schemas.subjects import RequestSubject, new_request_id
from schemas.wire import Failed, decode_frame, encode_envelope
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, collect, hook, refusal
from tests.pipeline.conftest import System, worker
from tests.queue import envelope
from tests.sse import events_of
from tests.talk import talking
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow

PIECES = [f"{number} " for number in range(400)]
BEGINS_S = 5.0
"""Until then a request stands in the queue, and runs if it can, also on a machine that stalls."""


def within(seconds: float) -> dict[str, str]:
    return {"x-request-timeout": f"{seconds}"}


def model_without_worker(system: System, name: str) -> None:
    """Have a model known that nothing serves, as `up --workers 0` does."""

    async def publish(bus: Bus) -> None:
        card = await read_card(bus, "sim")
        assert card is not None
        files = await load_files(bus, card)
        await publish_card(bus, msgspec.structs.replace(card, name=name), files)

    with_bus(system.nats_url, publish)
    wait_for(lambda: system.knows(name), within_s=10, what=name)


def error_of(raw: bytes) -> dict[str, Any]:
    """Return the error that ends a stream, as its last event."""
    events = events_of(raw)
    assert events, raw
    assert events[-1].id is None
    error: dict[str, Any] = events[-1].json["error"]
    return error


def ask_both(
    client: httpx.Client, body: dict[str, Any], timeout_s: float
) -> tuple[httpx.Response, httpx.Response]:
    """Ask for an object and for a stream at once, each with this timeout."""
    with ThreadPoolExecutor(2) as asking:
        whole, streamed = (
            asking.submit(client.post, CHAT, json=body | more, headers=within(timeout_s))
            for more in ({}, {"stream": True})
        )
    return whole.result(), streamed.result()


def test_what_expires_while_it_waits_is_504_and_never_started(system: System) -> None:
    busy = chat("busy", model="tiny", stream=True, sim=hook("a", "b", ttft_ms=0, itl_ms=60_000))
    body = chat("next", model="tiny", sim=hook("never"))
    answers: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        with system.client() as client:
            more = {"stream": stream}
            answers.append(client.post(CHAT, json=body | more, headers=within(0.7)))

    with system.client() as client, client.stream("POST", CHAT, json=busy) as running:
        lines = running.iter_lines()  # held: dropping it would close the connection
        next(lines)
        # One slot, four that the worker holds ahead of their turn, and some in the queue.
        threads = [threading.Thread(target=ask, args=(n % 2 == 0,)) for n in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 10
    for answer in answers:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.status_code == 200
            assert error_of(answer.content)["code"] == "deadline_exceeded"
        else:
            assert answer.status_code == 504, answer.text
            assert refusal(answer)["code"] == "deadline_exceeded"
            assert "retry-after" not in answer.headers
        nothing = {"starts": 0, "aborts": 0, "tokens": 0}
        assert system.ledger(answer.headers["x-request-id"]) == nothing
    system.wait_at_rest(within_s=system.leaves_within_s)


def test_what_expires_while_it_runs_is_aborted_and_said_to_have_expired(system: System) -> None:
    body = chat(sim=hook(*PIECES, ttft_ms=0, itl_ms=50))
    with system.client() as client:
        whole, streamed = ask_both(client, body, BEGINS_S)
    assert whole.status_code == 504
    assert refusal(whole)["code"] == "deadline_exceeded"
    assert error_of(streamed.content)["code"] == "deadline_exceeded"
    assert len(events_of(streamed.content)) > 1, "it had begun"
    assert "[DONE]" not in streamed.text
    for answer in (whole, streamed):
        _wait_aborted(system, answer.headers["x-request-id"])
    system.wait_at_rest()


def _wait_aborted(system: System, request: str) -> None:
    wait_for(lambda: system.ledger(request)["aborts"] == 1, within_s=15, what="the abort")
    assert system.ledger(request)["starts"] == 1


def test_a_request_that_is_delivered_too_late_is_ended_without_the_engine(system: System) -> None:
    subject = RequestSubject("online", "sim", 3, "default", new_request_id())
    late = msgspec.structs.replace(envelope(subject), deadline_s=time.time() - 1)

    async def ends_as(bus: Bus) -> list[str]:
        await bus.store(str(subject), encode_envelope(late))

        async def end() -> list[str]:
            entries = await journal.read(bus, "REPLIES", late.reply)
            frames = [decode_frame(entry.data) for entry in entries]
            return [frame.code for frame in frames if isinstance(frame, Failed)]

        return await until(end, within_s=10)

    assert with_bus(system.nats_url, ends_as) == ["deadline_exceeded"]
    assert system.ledger(subject.request)["starts"] == 0
    system.wait_at_rest()


def test_a_wait_for_a_model_without_worker_ends_in_503_and_not_before_its_time(
    system: System,
) -> None:
    model_without_worker(system, "idle")
    begun_s = time.monotonic()
    with system.client() as client:
        whole, streamed = ask_both(client, chat(model="idle"), BEGINS_S)
    assert time.monotonic() - begun_s >= BEGINS_S
    assert whole.status_code == 503
    assert refusal(whole)["code"] == "no_workers"
    assert int(whole.headers["retry-after"]) >= 1
    assert streamed.status_code == 200
    assert error_of(streamed.content)["code"] == "no_workers"
    system.wait_at_rest()


def test_a_resumed_wait_ends_at_the_requests_own_deadline(system: System) -> None:
    model_without_worker(system, "idle")
    body = chat(model="idle", stream=True, on_disconnect="continue")
    with system.client() as client:
        with client.stream("POST", CHAT, json=body, headers=within(5)) as first:
            request = first.headers["x-request-id"]
        again = client.get(f"{system.socket_end.url}/v1/streams/{request}")
    assert again.status_code == 200
    assert error_of(again.content)["code"] == "no_workers"
    system.wait_at_rest(within_s=system.leaves_within_s)


@pytest.mark.parametrize("away_s", [0.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_a_request_waits_for_the_first_worker_of_its_model_and_runs(
    system: System, tmp_path: Path, away_s: float
) -> None:
    model = f"late-{away_s:.0f}-{system.mode}"
    model_without_worker(system, model)
    texts: list[str] = []

    def ask() -> None:
        with system.client() as client:
            client.timeout = httpx.Timeout(120)
            answer = collect(client, chat(model=model, sim=hook("here")))
            texts.append(answer["choices"][0]["message"]["content"])

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: system.queued() == 1, within_s=10, what="the request in the queue")
    time.sleep(away_s)  # the fact itself: so long there is no worker
    first = worker("late", system.nats_url, tmp_path, "--served-model-name", model)
    try:
        asking.join(timeout=120)
        assert texts == ["here"]
    finally:
        first.process.stop()
    system.wait_at_rest()


# On a WebSocket


@pytest.mark.parametrize("how", ["message", "handshake", "both"])
def test_a_websocket_names_its_time_in_the_message_or_in_the_handshake(
    system: System, how: str
) -> None:
    """The message's counts where both do."""
    model_without_worker(system, "idle")
    header = {"message": None, "handshake": f"{BEGINS_S}", "both": "800"}[how]
    more = {} if how == "handshake" else {"timeout_s": BEGINS_S}

    async def run() -> None:
        options = {} if header is None else {"additional_headers": {"x-request-timeout": header}}
        async with talking(system.socket_end.url, CHAT, **options) as talk:
            slow = hook(*PIECES, ttft_ms=0, itl_ms=50)
            await talk.say({"id": "waits", "body": chat(model="idle")} | more)
            await talk.say({"id": "runs", "body": chat(sim=slow)} | more)
            waits, runs = talk.heard("waits"), talk.heard("runs")
            await talk.ended(waits, runs)
            assert waits.error is not None
            assert runs.error is not None
            assert waits.error["code"] == "no_workers"
            assert runs.error["code"] == "deadline_exceeded"
            assert runs.chunks

    asyncio.run(run())
    system.wait_at_rest()


BAD = [0, -1, 840.5, 1e12, "5", True, [], {}]


@pytest.mark.parametrize("timeout_s", BAD, ids=json.dumps)
def test_a_wrong_time_on_a_websocket_is_an_error_of_its_request(
    system: System, timeout_s: Any
) -> None:
    async def run() -> None:
        async with talking(system.socket_end.url, CHAT) as talk:
            await talk.say({"id": "a", "body": chat(), "timeout_s": timeout_s})
            heard = talk.heard("a")
            await talk.ended(heard)
            assert heard.error is not None
            assert (heard.error["type"], heard.error["param"]) == (
                "invalid_request_error",
                "timeout_s",
            )
            await talk.say({"id": "b", "body": chat(sim=hook("b")), "timeout_s": None})
            await talk.ended(talk.heard("b"))
            assert talk.heard("b").text() == "b"

    asyncio.run(run())


def _refused_handshake(system: System, value: str) -> InvalidStatus:
    async def run() -> None:
        url = system.socket_end.url.replace("http", "ws", 1) + CHAT
        headers = {"x-request-timeout": value}
        async with connect(url, additional_headers=headers, proxy=None):
            pass

    with pytest.raises(InvalidStatus) as refused:
        asyncio.run(run())
    return refused.value


WRONG: Sequence[str] = ["0", "-1", "841", "x", "1e2", "inf", "nan", ""]


@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_time_in_a_header_is_400(system: System, value: str) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(), headers={"x-request-timeout": value})
    assert answer.status_code == 400
    assert refusal(answer)["param"] == "x-request-timeout"
    refused = _refused_handshake(system, value)
    assert refused.response.status_code == 400
    assert json.loads(refused.response.body or b"")["error"]["param"] == "x-request-timeout"
