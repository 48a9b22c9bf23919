"""A client that leaves frees what it held, wherever its request stands."""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from headrace.bus import BusSettings, connection
from headrace.cancel import cancel
from tests.pipeline.asking import CHAT, COMPLETIONS, chat, collect, hook, stream
from tests.pipeline.conftest import System
from tests.queue import heard_during
from tests.waiting import until, wait_for

LEAVES_WITHIN_S = 1.0
AT_ONCE_MAX = 20
"""As many at once follow a redirect: who is not there after 5 s is not waited for."""


def all_answer(system: System) -> None:
    """Return once every process has answered: one that hears of a leaving late, since it stood
    still, keeps who looks for the leaving waiting as well."""
    for node in system.nodes:
        node.gauges()
    system.queued()


def wait_aborted(system: System, request: str) -> None:
    """Wait until the engine has given a request up, which its client has just left."""

    def aborted() -> bool:
        all_answer(system)
        return system.ledger(request)["aborts"] == 1

    wait_for(aborted, within_s=LEAVES_WITHIN_S, what="an abort")


@contextmanager
def reading(system: System, body: dict[str, Any], *, events: int = 0) -> Iterator[str]:
    """Hold a stream open, having read so many events; give its request id."""
    with (
        system.client() as client,
        client.stream("POST", CHAT, json=body | {"stream": True}) as answer,
    ):
        seen = 0
        if events:
            for line in answer.iter_lines():
                seen += line.startswith("data:")
                if seen == events:
                    break
        yield answer.headers["x-request-id"]


def test_leaving_before_the_first_token_aborts_within_a_second(system: System) -> None:
    with reading(system, chat(sim=hook("a", ttft_ms=60_000))) as request:
        wait_for(lambda: system.ledger(request)["starts"] == 1, within_s=15, what="a start")
    wait_aborted(system, request)
    assert system.ledger(request) == {"starts": 1, "aborts": 1, "tokens": 0}
    begun_s = time.monotonic()
    with system.client() as client:
        collect(client, chat(sim=hook("b")))
    assert time.monotonic() - begun_s < 30  # the other one's wait would last for twice as long


def test_leaving_after_token_3_of_500_makes_only_a_few_more(system: System) -> None:
    pieces = [f"{number} " for number in range(500)]
    with reading(system, chat(sim=hook(*pieces, itl_ms=300)), events=3) as request:
        pass
    wait_aborted(system, request)
    assert 3 <= system.ledger(request)["tokens"] < 60


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_leaving_an_unstreamed_request_aborts_it(system: System, path: str) -> None:
    # Its id comes with the answer only, so that it runs, and is no more on the way between a
    # redirect and its target, is seen in what all processes do.
    body = chat("x") if path == CHAT else {"model": "sim", "prompt": "x"}
    body["sim"] = hook("a", ttft_ms=60_000)

    def runs() -> bool:
        gauges = [item for node in system.nodes for item in node.gauges().items()]
        load = {name.partition("_")[2] for name, value in gauges if value}
        return {"worker_requests_running", f"{system.relay}_replies_open"} <= load

    async def leave() -> None:
        async with system.async_client() as client:
            asking = asyncio.create_task(client.post(path, json=body))
            await until(lambda: asyncio.to_thread(runs))
            asking.cancel()
            await asyncio.wait([asking])

    system.wait_at_rest(within_s=system.leaves_within_s)
    asyncio.run(leave())
    system.wait_at_rest(within_s=LEAVES_WITHIN_S)


def test_leaving_while_waiting_takes_the_request_out_of_the_queue(system: System) -> None:
    busy = chat(model="tiny", sim=hook("a", ttft_ms=60_000))
    waits = chat(model="tiny", sim=hook("never"))

    def one_is_left() -> bool:
        all_answer(system)
        return system.queued() == 1

    with reading(system, busy) as first:
        wait_for(lambda: system.ledger(first)["starts"] == 1, within_s=15, what="a start")
        with reading(system, waits) as second:
            wait_for(lambda: system.queued() == 2, within_s=15, what="two in the queue")
            # A worker may take it ahead of its turn; the engine must not be given it all the same.
            with contextlib.suppress(TimeoutError):
                held = "headrace_worker_requests_inflight"
                wait_for(lambda: system.tiny.metrics()[held] == 2, within_s=0.5, what="two held")
        wait_for(one_is_left, within_s=LEAVES_WITHIN_S, what="one in the queue")
        assert system.ledger(first) == {"starts": 1, "aborts": 0, "tokens": 0}
        assert system.ledger(second)["tokens"] == 0
        assert system.ledger(second)["starts"] == 0, "the engine was given it"
    system.wait_at_rest()


def test_a_queued_request_beyond_the_slots_leaves_unseen_by_the_engine(system: System) -> None:
    body = chat(model="tiny", stream=True, sim=hook("a", ttft_ms=60_000))
    with reading(system, body) as running:
        wait_for(lambda: system.ledger(running)["starts"] == 1, within_s=15, what="a start")
        leaving = contextlib.ExitStack()
        queued = leaving.enter_context(reading(system, body))
        heard_during(system.nats_url, leaving.close, count=1)  # before the other leaves
        wait_for(lambda: system.queued() == 1, within_s=system.leaves_within_s, what="its leaving")
    system.wait_at_rest()
    assert system.ledger(queued)["starts"] == 0
    with system.client() as client:
        assert stream(client, chat(model="tiny", sim=hook("next"))).text() == "next"


def test_leaving_and_an_explicit_cancel_make_one_abort_and_no_stray_error(system: System) -> None:
    async def cancel_it(request: str) -> None:
        async with connection(BusSettings(system.nats_url), name="test", timeout_s=30) as bus:
            await cancel(bus, tenant="default", request=request)

    with reading(system, chat(sim=hook("a", ttft_ms=60_000))) as request:
        wait_for(lambda: system.ledger(request)["starts"] == 1, within_s=15, what="a start")
        canceller = threading.Thread(target=lambda: asyncio.run(cancel_it(request)))
        canceller.start()
    canceller.join()
    wait_aborted(system, request)
    system.wait_at_rest()
    assert system.ledger(request) == {"starts": 1, "aborts": 1, "tokens": 0}
    logs = "".join(node.process.said() for node in system.nodes)
    assert "Traceback" not in logs
    assert "never retrieved" not in logs


def test_a_cancelled_stream_ends_with_the_error_request_cancelled(system: System) -> None:
    async def cancelled() -> list[str]:
        async with (
            connection(BusSettings(system.nats_url), name="test", timeout_s=30) as bus,
            system.async_client() as client,
            client.stream(
                "POST", CHAT, json=chat(stream=True, sim=hook("a", "b", itl_ms=60_000, ttft_ms=0))
            ) as answer,
        ):
            lines = []
            async for line in answer.aiter_lines():
                if not lines:
                    request = answer.headers["x-request-id"]
                    await cancel(bus, tenant="default", request=request)
                lines.append(line)
            return lines

    lines = asyncio.run(cancelled())
    assert '"code":"request_cancelled"' in lines[-2]
    assert lines[-2].startswith('data: {"error":')
    assert "data: [DONE]" not in lines


@pytest.mark.slow
def test_after_200_requests_that_end_in_every_way_all_gauges_are_0(system: System) -> None:
    choose = random.Random(7)
    kinds = [choose.choice(["whole", "leave", "fail", "hang", "refused"]) for _ in range(200)]
    turns = asyncio.Semaphore(AT_ONCE_MAX)

    async def ask(client: httpx.AsyncClient, number: int, kind: str) -> str:
        pieces = [f"{k} " for k in range(30)]
        sim = hook(*pieces, itl_ms=5, ttft_ms=number % 40)
        if kind == "fail":
            sim["fail_at"] = number % 30
        if kind == "hang":
            sim["hang_at"] = number % 30
        body = chat(str(number), stream=number % 2 == 0, sim=sim)
        if kind == "refused":
            body["temperature"] = -1
        patience_s = {"leave": 0.02 + number % 10 / 50, "hang": 0.5}.get(kind, 120)
        try:
            async with turns, asyncio.timeout(patience_s):
                answer = await client.post(CHAT, json=body)
        except TimeoutError:
            return kind if kind in ("leave", "hang") else "late"
        if kind == "whole":
            assert answer.status_code == 200
            assert "29 " in answer.text
        if kind == "refused":
            assert answer.status_code == 400
        if kind == "fail":
            assert '"engine_error"' in answer.text
        assert kind != "hang"
        return kind

    async def all_of_them() -> list[str]:
        async with system.async_client(timeout_s=120) as client:
            return await asyncio.gather(*(ask(client, n, kind) for n, kind in enumerate(kinds)))

    assert asyncio.run(all_of_them()) == kinds
    system.wait_at_rest(within_s=system.leaves_within_s)


def test_who_asks_for_a_head_alone_is_no_reader(system: System) -> None:
    """HEAD would count as one, whose leaving ends the request."""
    body = chat(sim=hook(*"abc", ttft_ms=0, itl_ms=60_000))
    with reading(system, body, events=1) as request:
        with httpx.Client(base_url=system.socket_end.url, timeout=30) as client:
            answer = client.head(f"/v1/streams/{request}")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET"
