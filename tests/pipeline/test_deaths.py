"""A worker that dies or freezes in the middle: its requests go on elsewhere, token by token."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import Node, System, worker
from tests.servers import wait_ready
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

STREAMS = 24
PIECES = [f"{number} " for number in range(400)]
"""8 s of them: the worker dies long before their end."""


async def _stream(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> list[str]:
    """Return the `id`s of a stream's events with their text; raise on an error event.

    `begun` is told of the fifth, or of the end of a stream that has none.
    """
    seen: list[str] = []
    try:
        await _read(client, number, seen, begun)
    finally:
        if len(seen) < 5:
            begun.release()
    return seen


async def _read(
    client: httpx.AsyncClient, number: int, seen: list[str], begun: asyncio.Semaphore
) -> None:
    body = chat(f"river {number}", stream=True, sim=hook(*PIECES, itl_ms=20, ttft_ms=0))
    async with client.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                seen.append(line.removeprefix("id: "))
            elif line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                seen[-1] += "=" + (chunk["choices"][0]["delta"].get("content") or "")
                if len(seen) == 5:
                    begun.release()


async def _over_a_death(
    system: System, victim: Node, number: signal.Signals
) -> list[list[str]] | None:
    """Run streams over a worker's death; None where it was given none of them."""

    def holds_some() -> bool:
        return victim.gauges()["headrace_worker_requests_inflight"] > 0

    begun = asyncio.Semaphore(0)
    async with system.async_client() as client:
        tasks = [asyncio.create_task(_stream(client, n, begun)) for n in range(STREAMS)]
        for _ in range(STREAMS):
            await begun.acquire()
        try:
            # A gauge is right within 0.3 s; five tokens come in a third of that.
            await asyncio.to_thread(wait_for, holds_some, within_s=1, what="something to lose")
        except TimeoutError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return None
        os.kill(victim.process.pid, number)
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_every_token_of_a_dead_or_frozen_workers_requests_comes_once_in_order(
    system: System, tmp_path: Path, number: signal.Signals
) -> None:
    victim = worker("victim", system.nats_url, tmp_path)
    wait_ready(victim.process, victim.admin_url)

    def has_its_share() -> bool:
        """Ask for short answers until the others have left the newcomer its partitions."""
        with system.client() as client:
            for n in range(STREAMS):
                assert client.post(CHAT, json=chat(f"river {n}", max_tokens=1)).status_code == 200
        return victim.metrics()["headrace_worker_requests_finished_total"] > 2

    wait_for(has_its_share, within_s=30, what="the newcomer's share of the requests")

    async def run() -> list[list[str]] | None:
        for _ in range(5):
            outcomes = await _over_a_death(system, victim, number)
            if outcomes is not None:
                return outcomes
        return None

    try:
        outcomes = asyncio.run(run())
        whole = [f"{seq}={piece}" for seq, piece in enumerate(PIECES)] + [f"{len(PIECES)}="]
        assert outcomes == [whole] * STREAMS
        if number is signal.SIGSTOP:
            os.kill(victim.process.pid, signal.SIGCONT)
            wait_for(
                lambda: not any(victim.gauges().values()),
                within_s=10,
                what="the thawed worker to give up what it lost",
            )
        system.wait_at_rest(within_s=10)
    finally:
        if number is signal.SIGSTOP:
            victim.process.terminate()
        victim.process.stop()
