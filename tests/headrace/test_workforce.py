"""Which models have a worker, as the registry tells."""

import asyncio

import msgspec

from headrace import registry, topology
from headrace.bus import Bus, BusSettings, connection
from headrace.workforce import Workforce, no_workers
from schemas import subjects
from schemas.model import WorkerEntry
from tests.broker import with_bus
from tests.waiting import until


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def says(bus: Bus, name: str, model: str, *, draining: bool = False) -> None:
    entry = WorkerEntry(name=name, model=model, slots=1, draining=draining)
    # As `announce` does, but acknowledged: who reads the bucket next finds it there.
    await bus.store(f"$KV.{subjects.WORKERS}.{name}", msgspec.json.encode(entry))


def test_a_model_is_served_while_one_of_its_workers_takes_requests(url: str) -> None:
    async def test(bus: Bus) -> None:
        await says(bus, "before", "a")
        workforce = Workforce(bus, clock=Clock())
        await workforce.start()
        assert workforce.serves("a"), "who was there before is read"
        assert not workforce.serves("b")
        await says(bus, "w", "b")
        await until(lambda: workforce.serves("b"))
        await says(bus, "w", "b", draining=True)
        await until(lambda: not workforce.serves("b"))
        await says(bus, "w2", "b")
        await until(lambda: workforce.serves("b"))
        await registry.withdraw(bus, subjects.WORKERS, "w2")
        await until(lambda: not workforce.serves("b"))
        assert workforce.serves("a")

    with_bus(url, test)


def test_a_silent_worker_counts_for_two_lifetimes_of_its_entry(url: str) -> None:
    async def test() -> None:
        async with connection(BusSettings(url), name="test", timeout_s=10) as bus:
            await says(bus, "w", "m")
            clock = Clock()
            workforce = Workforce(bus, clock=clock)
            await workforce.start()
            following = asyncio.create_task(workforce.follow())
            clock.now_s += 2 * topology.ENTRY_TTL_S
            assert workforce.serves("m")
            clock.now_s += 0.1
            await until(lambda: not workforce.serves("m"))
            following.cancel()

    asyncio.run(test())


def test_who_finds_no_worker_is_told_when_to_come_again() -> None:
    refusal = no_workers("m")
    assert (refusal.status, refusal.code) == (503, "no_workers")
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1
    assert "'m'" in refusal.message
