"""A gateway that is told to stop ends its sockets with 1001, after what runs on them."""

import asyncio
from pathlib import Path

import pytest

from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import System, models_at
from tests.servers import Process, free_port, node, wait_ready
from tests.talk import talking
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

HELD = chat(sim=hook("a", "b", ttft_ms=0, itl_ms=600_000))


def _gateway(system: System, folder: Path, *args: str) -> tuple[Process, str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    args = ("--nats-url", system.nats_url, "--port", str(port), *args)
    process = node("gateway", *args, log=folder / "gateway.log")
    wait_ready(process, url)
    wait_for(lambda: "sim" in models_at(url), within_s=15, what="the model")
    return process, url


def test_an_idle_socket_closes_at_once_and_a_busy_one_after_its_last_request(
    system: System, tmp_path: Path
) -> None:
    process, url = _gateway(system, tmp_path, "--grace-s", "120")

    async def run() -> None:
        async with talking(url, CHAT) as idle, talking(url, CHAT) as busy:
            pieces = [f"{k} " for k in range(50)]
            held = await busy.begin("held", HELD)
            await busy.chunks_came(held, 1)
            heard = await busy.begin("a", chat(sim=hook(*pieces, itl_ms=30, ttft_ms=0)))
            await busy.chunks_came(heard, 1)
            process.terminate()
            assert await idle.end() == 1001
            late = await busy.ask("late", chat())
            assert late.error is not None
            assert late.error["code"] == "draining"
            await busy.ended(heard)
            assert heard.text() == "".join(pieces)
            assert heard.done
            assert not held.ended.is_set()
            await busy.cancel("held")
            assert await busy.end() == 1001
            assert held.error is not None
            assert held.error["code"] == "request_cancelled"

    try:
        asyncio.run(run())
        assert process.stop() == 0
    finally:
        process.stop()
    assert "Traceback" not in process.said()
    system.wait_at_rest()


@pytest.mark.parametrize("sockets", [1, 12])
def test_past_the_grace_streams_end_in_an_error_and_sockets_in_1001(
    system: System, tmp_path: Path, sockets: int
) -> None:
    process, url = _gateway(system, tmp_path, "--grace-s", "0.3")
    requests: list[str] = []

    async def one() -> None:
        async with talking(url, CHAT) as talk:
            all_heard = [await talk.begin(f"{n}", HELD) for n in range(12 // sockets)]
            for heard in all_heard:
                await talk.chunks_came(heard, 1)
                requests.append("req_" + heard.chunks[0]["id"].removeprefix("chatcmpl-"))
            begun.release()
            assert await talk.end() == 1001
            for heard in all_heard:
                assert heard.error is not None
                assert heard.error["code"] == "stream_interrupted"

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(sockets):
                group.create_task(one())
            for _ in range(sockets):
                await begun.acquire()
            process.terminate()

    begun = asyncio.Semaphore(0)
    try:
        asyncio.run(run())
        assert process.stop() == 0
    finally:
        process.stop()
    assert "Traceback" not in process.said()
    with system.client() as client:
        for request in requests:  # they may be resumed, so they run on
            answer = client.post(f"/v1/requests/{request}/cancel")
            assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    system.wait_at_rest()
