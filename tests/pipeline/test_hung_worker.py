"""A worker that hangs beside a healthy one: what the healthy one serves is served as before."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.pipeline.asking import chat, hook
from tests.pipeline.conftest import Mode
from tests.pipeline.metered import Metered, exchange, metered
from tests.servers import freeze
from tests.waiting import until

pytestmark = pytest.mark.slow


def test_beside_a_worker_that_hangs_every_request_is_answered_by_the_other(
    mode: Mode, tmp_path: Path
) -> None:
    models = {f"twin-{n}": '{"max_num_seqs": 4}' for n in (1, 2)}

    async def ask(house: Metered, number: int) -> str:
        body = chat(f"request {number}", model="twin", sim=hook("a", "b", itl_ms=20))
        answer = await exchange(house.doors[0].url, "free", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def run(house: Metered) -> None:
        worker = house.workers["twin-1"].process
        await asyncio.to_thread(freeze, worker.pid)
        try:
            # What it was handed before its pulls lapsed comes back; all others never went there.
            texts = await asyncio.gather(*(ask(house, number) for number in range(60)))
            assert texts == ["ab"] * 60
            await until(lambda: asyncio.to_thread(lambda: _finished(house) == 60))
            for number in range(60, 100):
                assert await ask(house, number) == "ab"
            await until(lambda: asyncio.to_thread(lambda: _finished(house) == 100))
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        await until(lambda: asyncio.to_thread(lambda: house.running("twin-1") == 0))
        assert await ask(house, 100) == "ab"

    with metered(mode, tmp_path, tenants={"free": ""}, models=models) as house:
        asyncio.run(run(house))


def _finished(house: Metered) -> int:
    """Return how many requests the healthy worker has answered."""
    return int(house.workers["twin-2"].metrics()["headrace_worker_requests_finished_total"])
