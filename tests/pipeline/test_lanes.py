"""Tenants of class `batch` wait in a lane of their own: after all others, and not for ever.

The model `tiny` has one slot, `pair` four. Shares are counted in answers.
"""

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest

from headrace.bus import Bus
from headrace.dismiss import dismiss
from schemas.subjects import requests_of
from tests.broker import with_bus
from tests.pipeline.asking import chat, hook
from tests.pipeline.conftest import Mode
from tests.pipeline.metered import LONG, Metered, exchange, metered
from tests.pipeline.slots import slots
from tests.waiting import until
from workers.credit import BATCH_OWED_AFTER

pytestmark = pytest.mark.slow

TERMS = {"free": "", "busy": "", "bulk": 'priority_class = "batch"'}


@pytest.fixture(scope="module")
def house(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    models = {"tiny": '{"max_num_seqs": 1}', "pair": '{"max_num_seqs": 4}'}
    folder = tmp_path_factory.mktemp("lanes")
    patience = ("--queue-patience-s", "300")  # longer than a test takes
    with metered(mode, folder, tenants=TERMS, models=models, every=patience) as found:
        yield found


def queued(house: Metered, lane: str, model: str) -> int:
    async def count(bus: Bus) -> int:
        body = {"subjects_filter": f"requests.{lane}.{model}.*.*.*"}
        info = await bus.api("STREAM.INFO.REQUESTS", body)
        return len(info["state"].get("subjects") or {})

    return with_bus(house.nats_url, count)


def test_the_class_says_the_lane(house: Metered) -> None:
    with house.busy("tiny"):
        bulk = house.sent("bulk", chat(model="tiny", sim=LONG, stream=True))
        other = house.sent("busy", chat(model="tiny", sim=LONG, stream=True))

        async def stand() -> None:
            where = [("batch", 1), ("online", 2)]  # of which one runs
            await until(
                lambda: asyncio.to_thread(
                    lambda: all(queued(house, lane, "tiny") == count for lane, count in where)
                )
            )

        asyncio.run(stand())
        bulk.close()
        other.close()
        for tenant in ("bulk", "busy"):  # who was redirected is gone, but not the request
            with_bus(house.nats_url, partial(dismiss, subject_filter=requests_of(tenant=tenant)))


def test_batch_goes_after_the_others_that_wait(house: Metered) -> None:
    async def until_there(count: int) -> None:
        await until(
            lambda: asyncio.to_thread(lambda: house.waiting() + house.queued() == count),
        )

    async def run() -> list[str]:
        async with slots(house, "pair") as pair:
            pair.ask("busy", 4)
            held = [await pair.next() for _ in range(4)]
            pair.ask("bulk", 4)
            await until_there(8)
            pair.ask("busy", 12)
            await until_there(20)
            for _ in range(12):  # one slot of four is free at a time
                held[-4].leave.set()
                held.append(await pair.next())
            for slot in held[-4:]:
                slot.leave.set()
            for _ in range(4):  # no more than two of them at a time
                held.append(await pair.next())
                held[-1].leave.set()
        return [slot.tenant for slot in held[4:]]

    served = asyncio.run(run())
    # It is owed one of 20, whatever was served before this test.
    assert served[:12].count("bulk") <= 1, served
    assert served.count("bulk") == 4


def test_batch_is_served_although_others_never_leave_a_slot_free(house: Metered) -> None:
    answered: list[str] = []

    async def ask(tenant: str) -> None:
        body = chat(model="pair", sim=hook("a", ttft_ms=300))
        answer = await exchange(house.doors[0].url, tenant, body)
        assert answer.status_code == 200, answer.text
        answered.append(tenant)

    async def crowd(bulk: "asyncio.Future[list[None]]") -> None:
        while not bulk.done():
            await ask("busy")

    async def run() -> None:
        begun = asyncio.get_running_loop().create_future()
        loud = [asyncio.create_task(crowd(begun)) for _ in range(12)]
        await until(lambda: len(answered) > 12)
        answered.clear()
        bulk = [asyncio.create_task(ask("bulk")) for _ in range(3)]
        async with asyncio.timeout(60):
            await asyncio.gather(*bulk)
        begun.set_result([])
        await asyncio.gather(*loud)

    asyncio.run(run())
    last = [n for n, tenant in enumerate(answered) if tenant == "bulk"][-1]
    assert last < 3 * 2 * BATCH_OWED_AFTER, answered
