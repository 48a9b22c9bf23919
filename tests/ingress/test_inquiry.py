"""Ingress nodes asked from elsewhere: each answers for itself, and what is withdrawn stays out."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from headrace import inquire, topology
from headrace.bus import Bus, Message
from headrace.inquire import (
    count_waiting,
    find_waiting,
    withdraw_one,
    withdraw_waiting,
)
from ingress import inquiry
from ingress.admission import Ticket
from ingress.inquiry import Inquiry
from ingress.waiting import WaitingRoom
from schemas import subjects
from schemas.errors import RequestCancelled
from schemas.subjects import RequestSubject, new_request_id
from schemas.waiting import CountQuestion, Selection
from tests.broker import with_bus
from tests.waiting import until

_models = itertools.count()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for answers longer than a busy machine stands still."""
    monkeypatch.setattr(inquire, "ANSWER_S", 6.0)


class Node:
    """One ingress: its room, and the requests that were sent to it."""

    def __init__(self, room: WaitingRoom, model: str) -> None:
        self.room = room
        self._model = model
        self._asked: dict[str, asyncio.Task[None]] = {}

    async def ask(self, tenant: str = "a", *, key: str | None = None, count: int = 1) -> list[str]:
        """Have requests wait, and return their ids."""
        names = [new_request_id() for _ in range(count)]
        depth = self.room.depth
        for name in names:
            now_s = time.monotonic()
            ticket = Ticket(name, tenant, "standard", 1, 9, 9, 10, now_s, now_s + 30, key=key)
            self._asked[name] = asyncio.create_task(self.room.enter(self._model, ticket))
        await until(lambda: self.room.depth == depth + count)
        return names

    async def cancelled(self, requests: Sequence[str]) -> bool:
        """Tell whether all of these end as cancelled ones."""
        async with asyncio.timeout(30):
            ends = await asyncio.gather(
                *[self._asked.pop(name) for name in requests], return_exceptions=True
            )
        return all(isinstance(end, RequestCancelled) for end in ends)

    async def close(self) -> None:
        """Let all leave."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)


@asynccontextmanager
async def nodes(bus: Bus, *, count: int = 2) -> AsyncIterator[tuple[str, list[Node]]]:
    """Run the rooms of some ingress before a model's full queue; yield the model and the nodes."""
    await topology.apply(bus)
    model = f"asked-{next(_models)}-{time.time_ns()}"
    for _ in range(2):
        await bus.store(str(RequestSubject("online", model, 0, "a", new_request_id())), b"")
    async with AsyncExitStack() as cleanup:
        found = []
        for number in range(count):
            room = WaitingRoom(bus, lambda _: 1, clock=time.monotonic)
            node = Node(room, model)
            cleanup.push_async_callback(node.close)
            cleanup.callback(asyncio.create_task(room.release_forever()).cancel)
            await Inquiry(bus, room, node=f"node-{number}", clock=time.monotonic).start()
            for _ in range(2):  # they pass, and are not stored: only now is the queue looked at
                now_s = time.monotonic()
                ticket = Ticket("early", "a", "standard", 1, 9, 9, 9, now_s, now_s + 30)
                await room.enter(model, ticket)
                room.landed(model)
            found.append(node)
        yield model, found
    await bus.purge(subjects.REQUESTS, subjects.requests_of(model=model))


@pytest.mark.slow
def test_each_node_counts_what_waits_with_it(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with nodes(bus) as (model, (one, other)):
            await one.ask("a", count=2)
            await other.ask("b")
            answers = await count_waiting(bus, CountQuestion(by="tenant"))
            rows = {answer.node: dict(answer.rows) for answer in answers}
            assert {node: list(of_node) for node, of_node in rows.items()} == {
                "node-0": ["a"],
                "node-1": ["b"],
            }
            assert [answer.marks[model].watermark for answer in answers] == [2, 2]
            only = CountQuestion(of=Selection(tenant="a"))
            assert sum(each.total.waiting for each in await count_waiting(bus, only)) == 2

    with_bus(nats_url, run)


@pytest.mark.slow
def test_a_request_is_found_wherever_it_waits_and_no_other_is(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with nodes(bus) as (model, (_, other)):
            first, second = await other.ask("a", count=2)
            found = (await find_waiting(bus, second)).answer
            assert found is not None
            assert found.place is not None
            assert (found.node, found.place.model, found.place.ahead) == ("node-1", model, 1)
            assert (found.place.mark.queued, found.place.mark.watermark) == (2, 2)
            assert 0 < found.place.gives_up_in_s <= 30
            assert await find_waiting(bus, new_request_id()) == (2, None)
            ahead = (await find_waiting(bus, first)).answer
            assert ahead is not None
            assert ahead.place is not None
            assert ahead.place.ahead == 0

    with_bus(nats_url, run)


def test_a_withdrawn_request_ends_and_is_cancelled_when_asked_again(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with nodes(bus) as (_, (_, other)):
            gone, stays = await other.ask("a", count=2)
            answer = (await withdraw_one(bus, gone, tenant="a")).answer
            assert answer is not None
            assert (answer.node, answer.withdrawn) == ("node-1", 1)
            assert await other.cancelled([gone])
            again = (await withdraw_one(bus, gone, tenant="a")).answer
            assert again is not None
            assert (again.withdrawn, again.before) == (0, True)
            assert other.room.depth == 1
            assert (await find_waiting(bus, stays)).answer is not None

    with_bus(nats_url, run)


@pytest.mark.slow
def test_nobody_withdraws_another_tenants_request(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with nodes(bus, count=1) as (_, (one,)):
            [request] = await one.ask("a")
            assert await withdraw_one(bus, request, tenant="b") == (1, None)
            one.room.withdraw(request, tenant="b")
            assert one.room.depth == 1
            assert (await withdraw_one(bus, request, tenant="a")).answer is not None
            assert await one.cancelled([request])
            assert await withdraw_one(bus, request, tenant="b") == (1, None)

    with_bus(nats_url, run)


@pytest.mark.slow
def test_all_of_a_tenant_or_of_its_key_are_withdrawn_and_the_others_stay(
    nats_url: str,
) -> None:
    async def run(bus: Bus) -> None:
        async with nodes(bus) as (model, (one, other)):
            keyed = await one.ask("a", key="k")
            mine = [await node.ask("a", count=250) for node in (one, other)]
            await other.ask("b", count=3)
            answers = await withdraw_waiting(bus, Selection(tenant="a", key="k"))
            assert sorted(answer.withdrawn for answer in answers) == [0, 1]
            assert await one.cancelled(keyed)
            answers = await withdraw_waiting(bus, Selection(tenant="a", model=model))
            assert [answer.withdrawn for answer in answers] == [250, 250]
            for node, requests in zip((one, other), mine, strict=True):
                assert await node.cancelled(requests)
            assert (one.room.depth, other.room.depth) == (0, 3)

    with_bus(nats_url, run)


@pytest.mark.slow
def test_a_word_that_names_nothing_withdraws_nothing_and_one_that_is_none_is_dropped(
    nats_url: str,
) -> None:
    async def run(bus: Bus) -> None:
        async with nodes(bus, count=1) as (_, (one,)):
            await one.ask("a", count=2)
            assert await withdraw_waiting(bus, Selection()) == []
            for subject in (
                subjects.WAITING_COUNT,
                subjects.WAITING_FIND,
                subjects.WAITING_WITHDRAW,
            ):
                await bus.publish(subject, b"\xff", reply=bus.new_inbox())
            [answer] = await count_waiting(bus, CountQuestion())
            assert answer.total.waiting == one.room.depth == 2

    with_bus(nats_url, run)


def test_who_is_withdrawn_is_told_so_though_nobody_waits_for_the_answer(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with nodes(bus, count=1) as (_, (one,)):
            requests = await one.ask("a", count=2)
            await bus.publish(subjects.WAITING_WITHDRAW, msgspec.json.encode(Selection(tenant="a")))
            assert await one.cancelled(requests)

    with_bus(nats_url, run)


@pytest.mark.slow
def test_only_so_many_withdrawn_requests_are_remembered(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiry, "REMEMBERED_MAX", 2)

    async def run(bus: Bus) -> None:
        async with nodes(bus, count=1) as (_, (one,)):
            requests = await one.ask("a", count=3)
            await withdraw_waiting(bus, Selection(tenant="a"))
            assert await one.cancelled(requests)
            said = [(await withdraw_one(bus, request)).answer for request in requests]
            assert [answer is not None for answer in said] == [False, True, True]

    with_bus(nats_url, run)


def test_where_nobody_listens_there_is_no_answer(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        assert await count_waiting(bus, CountQuestion()) == []
        assert await find_waiting(bus, new_request_id()) == (0, None)
        assert await withdraw_one(bus, new_request_id()) == (0, None)

    with_bus(nats_url, run)


@pytest.mark.slow
def test_who_does_not_answer_or_not_in_our_words_is_not_waited_for(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        heard = []

        async def keep_quiet(message: Message) -> None:
            heard.append(message)

        async def babble(message: Message) -> None:
            await bus.publish(message.reply, msgspec.json.encode({"node": 7}))

        await bus.subscribe(subjects.WAITING_COUNT, keep_quiet)
        await bus.subscribe(subjects.WAITING_COUNT, babble)
        async with nodes(bus, count=1):
            [answer] = await count_waiting(bus, CountQuestion())
        assert answer.node == "node-0"
        assert len(heard) == 1

    with_bus(nats_url, run)


@pytest.mark.slow
def test_the_rooms_gauges_are_by_model_by_class_and_by_age(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        async with nodes(bus, count=1) as (model, (one,)):
            assert one.room.oldest_age_s() == 0.0
            requests = await one.ask("a", count=2)
            assert one.room.depths_by_model() == {model: 2}
            assert one.room.depths_by_class() == {"interactive": 0, "standard": 2, "batch": 0}
            assert one.room.oldest_age_s() > 0
            await withdraw_waiting(bus, Selection(tenant="a"))
            assert await one.cancelled(requests)
            assert one.room.depths_by_model() == {model: 0}
            assert one.room.oldest_age_s() == 0.0

    with_bus(nats_url, run)
