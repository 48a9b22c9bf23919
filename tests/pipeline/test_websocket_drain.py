"""A gateway that is told to stop ends its sockets with 1001, after what runs on them."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import System
from tests.servers import Process, free_port, node, wait_ready
from tests.talk import talking
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def _gateway(system: System, folder: Path, *args: str) -> tuple[Process, str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    args = ("--nats-url", system.nats_url, "--port", str(port), *args)
    process = node("gateway", *args, log=folder / "gateway.log")
    wait_ready(process, url)
    models = "sim"
    wait_for(
        lambda: models in httpx.get(f"{url}/readyz").json()["models"], within_s=10, what="models"
    )
    return process, url


def test_an_idle_socket_closes_at_once_and_a_busy_one_after_its_last_request(
    system: System, tmp_path: Path
) -> None:
    process, url = _gateway(system, tmp_path)

    async def run() -> None:
        async with talking(url, CHAT) as idle, talking(url, CHAT) as busy:
            pieces = [f"{k} " for k in range(50)]
            heard = await busy.begin("a", chat(sim=hook(*pieces, itl_ms=30, ttft_ms=0)))
            await busy.chunks_came(heard, 1)
            process.terminate()
            assert await idle.end() == 1001
            assert not heard.done
            late = await busy.ask("late", chat())
            assert late.error is not None
            assert late.error["code"] == "draining"
            assert await busy.end() == 1001
            assert heard.text() == "".join(pieces)
            assert heard.done

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

    async def one() -> None:
        async with talking(url, CHAT) as talk:
            body = chat(sim=hook(*(f"{k} " for k in range(40)), itl_ms=60, ttft_ms=0))
            all_heard = [await talk.begin(f"{n}", body) for n in range(12 // sockets)]
            await talk.chunks_came(all_heard[-1], 1)
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
    system.wait_at_rest(within_s=6)  # they may be resumed, so they run on
