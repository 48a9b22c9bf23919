"""More than the workers can do: who waits how long, who is refused, and what each is told.

Rule: shares and waits are counted in answers, not in seconds. The model `pair` has four slots.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import pytest

from tests.pipeline.asking import CHAT, chat, hook, refusal
from tests.pipeline.conftest import Mode
from tests.pipeline.metered import Metered, exchange, metered
from tests.pipeline.slots import slots
from tests.waiting import until, wait_for

SLOTS = 4
QUEUED_MAX = 2 * SLOTS
"""How many are let into the queue, running ones too, while others wait at the door."""
SERVICE_MS = 300.0
PAUSE_S = 0.3
"""Between two that ask to be refused."""
PATIENCE_S = 20
"""The last door's; at the others nobody waits for too long."""
TERMS = {
    "free": "",
    "loud": "",
    "quiet": "",
    "heavy": "weight = 3",
    "light": "weight = 1",
    "bounded": "queued_requests = 3",
    "never": "queued_requests = 0",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def house(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    models = {"pair": f'{{"max_num_seqs": {SLOTS}}}', "tiny": '{"max_num_seqs": 1}'}
    folder = tmp_path_factory.mktemp("saturation")
    patience = ("--queue-patience-s", str(PATIENCE_S))
    patient = ("--queue-patience-s", "300")
    kinds = {"every": patient, "last": patience}
    with metered(mode, folder, tenants=TERMS, models=models, doors=2, **kinds) as found:
        yield found


class Crowd:
    """Clients of one door, the order in which their answers came, and how many were served."""

    def __init__(self, house: Metered, door: int) -> None:
        self.answered: list[str] = []
        self.served = 0
        self._url = house.doors[door].url
        self._tasks: list[asyncio.Task[httpx.Response]] = []

    async def ask(self, tenant: str, **more: Any) -> httpx.Response:
        """Ask for an answer that takes `SERVICE_MS`."""
        body = chat(**{"model": "pair", "sim": hook("a", ttft_ms=SERVICE_MS)} | more)
        answer = await exchange(self._url, tenant, body)
        self.answered.append(tenant)
        self.served += answer.status_code == 200
        return answer

    def send(self, tenant: str, count: int, **more: Any) -> None:
        """Send requests without waiting for them."""
        self._tasks += [asyncio.create_task(self.ask(tenant, **more)) for _ in range(count)]

    async def leave(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def crowded(
    house: Metered, clients: Crowd, *, more: dict[str, Any] | None = None, **tenants: int
) -> None:
    """Have so many requests of each wait, all of them before the first is served; `more` is in
    their bodies."""
    async with stopped(house, clients, more=more, **tenants):
        pass


@asynccontextmanager
async def stopped(
    house: Metered, clients: Crowd, *, more: dict[str, Any] | None = None, **tenants: int
) -> AsyncIterator[None]:
    """Have so many requests of each wait, and none of them served before the block's end."""
    async with slots(house, "pair") as pair:
        pair.ask("free", SLOTS)
        for _ in range(SLOTS):
            await pair.next()
        for tenant, count in tenants.items():
            clients.send(tenant, count, **(more or {}))
        there = sum(tenants.values()) - QUEUED_MAX
        await until(lambda: asyncio.to_thread(lambda: house.waiting() >= there), within_s=60)
        yield


@asynccontextmanager
async def crowd(house: Metered, door: int = 0) -> AsyncIterator[Crowd]:
    clients = Crowd(house, door)
    try:
        yield clients
    finally:
        await clients.leave()
        await until(lambda: asyncio.to_thread(lambda: house.waiting() == 0))


def test_a_quiet_tenant_waits_about_one_service_time_behind_a_loud_ones_200(
    house: Metered,
) -> None:
    async def run() -> list[int]:
        between = []
        async with crowd(house) as clients:
            await crowded(house, clients, loud=200)
            for _ in range(20):
                before = len(clients.answered)
                assert (await clients.ask("quiet")).status_code == 200
                between.append(len(clients.answered) - before - 1)
        return between

    assert usual(asyncio.run(run())) <= 3 * SLOTS


def usual(between: list[int]) -> int:
    """Return what three of four do not pass: where a process stands still, more end meanwhile.

    As many of the loud one's end in a service time as there are slots: two times to wait, and the
    one that the quiet one's own takes.
    """
    return sorted(between)[3 * len(between) // 4]


def test_tenants_of_weight_3_and_1_are_served_3_to_1_while_both_wait(house: Metered) -> None:
    async def run() -> list[str]:
        async with crowd(house) as clients:
            await crowded(house, clients, heavy=150, light=150)
            begun = len(clients.answered) + QUEUED_MAX  # these passed in their order of arrival
            await until(lambda: len(clients.answered) >= begun + 120, within_s=90)
            return clients.answered[begun : begun + 120]

    served = asyncio.run(run())
    assert served.count("heavy") == pytest.approx(90, abs=0.05 * 90), served


def test_who_may_have_three_waiting_is_refused_a_fourth_at_once(house: Metered) -> None:
    async def run() -> list[httpx.Response]:
        async with crowd(house) as clients:
            async with stopped(house, clients, loud=100):
                asked = [asyncio.create_task(clients.ask("bounded")) for _ in range(10)]
                await until(lambda: sum(each.done() for each in asked) >= 7)
            return await asyncio.gather(*asked)

    answers = asyncio.run(run())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 7
    for answer in refused:
        assert refusal(answer)["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1


class Told(NamedTuple):
    """What a refused client was told, when, and how many had their answers by then."""

    seconds: int
    answered: int
    at_s: float

    def answered_since(self, earlier: "Told") -> float:
        """Return how many had their answers, in a second."""
        return (self.answered - earlier.answered) / (self.at_s - earlier.at_s)


def test_the_time_to_come_again_shrinks_as_the_backlog_drains(house: Metered) -> None:
    async def run() -> list[Told]:
        told = []
        async with crowd(house) as clients:
            await crowded(house, clients, loud=150)
            await until(lambda: len(clients.answered) > 20)
            while house.waiting() > 4:
                answer = await clients.ask("never")
                if answer.status_code == 429:
                    seconds = int(answer.headers["retry-after"])
                    told.append(Told(seconds, len(clients.answered), time.monotonic()))
                await asyncio.sleep(PAUSE_S)
        return told

    told = asyncio.run(run())
    assert told[0].seconds > told[-1].seconds >= 1
    # Where the backlog or the door stood still for a moment, it takes longer indeed.
    pace = told[-1].answered_since(told[0])
    steady = [
        (earlier, later)
        for earlier, later in itertools.pairwise(told)
        if later.answered_since(earlier) > pace / 2 and later.at_s - earlier.at_s < 2 * PAUSE_S
    ]
    assert steady
    assert max(later.seconds - earlier.seconds for earlier, later in steady) <= 2, told


def test_who_waits_longer_than_the_patience_is_told_the_queue_did_not_take_it(
    house: Metered,
) -> None:
    with house.full("tiny"), house.client("quiet", door=-1) as client:
        answer = client.post(CHAT, json=chat(model="tiny"))
    assert (answer.status_code, refusal(answer)["code"]) == (429, "queue_timeout")
    assert int(answer.headers["retry-after"]) >= 1


def test_who_would_wait_longer_than_the_patience_is_refused_when_it_comes(
    house: Metered,
) -> None:
    async def run() -> tuple[list[httpx.Response], list[httpx.Response], int]:
        async with crowd(house, door=-1) as clients:
            slow = {"sim": hook("a", ttft_ms=2 * SERVICE_MS), "max_tokens": 1}  # alike in cost
            # For 39 s, and before anything was measured all may wait.
            await crowded(house, clients, more=slow, loud=260)
            async with asyncio.timeout(60):
                while clients.served == len(clients.answered):  # nobody has been refused yet
                    clients.send("loud", 1, **slow)
                    await asyncio.sleep(0.1)
            before = clients.served
            refused = [await clients.ask("loud", **slow) for _ in range(5)]
            between = clients.served - before
            return refused, [await clients.ask("quiet")], between

    refused, quiet, between = asyncio.run(run())
    for answer in refused:
        assert (answer.status_code, refusal(answer)["code"]) == (429, "queue_timeout")
        assert int(answer.headers["retry-after"]) > 1
    assert [answer.status_code for answer in quiet] == [200]
    # Whoever waits in vain does so for the patience, in which so many are served.
    assert between < PATIENCE_S * 1000 / (2 * SERVICE_MS) * SLOTS, "they were refused after a wait"


def test_whose_deadline_passes_while_it_waits_is_told_so(house: Metered) -> None:
    with house.full("tiny"), house.client("quiet") as client:
        started_s = time.monotonic()
        answer = client.post(CHAT, json=chat(model="tiny"), headers={"x-request-timeout": "1"})
    assert (answer.status_code, refusal(answer)["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - started_s >= 1


def test_a_door_that_stops_sends_those_who_wait_elsewhere(house: Metered) -> None:
    with house.full("tiny") as others, house.client("quiet", door=-1) as client:
        door = house.doors[-1]

        async def ask() -> httpx.Response:
            asking = asyncio.create_task(
                asyncio.to_thread(client.post, CHAT, json=chat(model="tiny"))
            )
            await until(lambda: house.waiting() == others + 1)
            door.process.terminate()
            return await asking

        answer = asyncio.run(ask())
    assert (answer.status_code, refusal(answer)["code"]) == (503, "draining")
    assert int(answer.headers["retry-after"]) >= 1
    wait_for(lambda: not door.process.alive, within_s=20, what="its end")
