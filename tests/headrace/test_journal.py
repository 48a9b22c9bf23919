"""Reading a stream back by subject: all of it, in order, however long."""

import asyncio
import time
from contextlib import aclosing

import pytest

from headrace import journal
from headrace.bus import BrokerAway, Bus, Message
from headrace.journal import Entry
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until


async def stream(bus: Bus, name: str) -> None:
    config = {"name": name, "subjects": [f"{name}.>"], "allow_direct": True, "storage": "memory"}
    await bus.api(f"STREAM.CREATE.{name}", config)


def test_the_messages_of_a_subject_come_in_order_and_no_others(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "j1")
        for number in range(10):
            await bus.store(f"j1.{'ab'[number % 2]}", b"%d" % number)
        found = await journal.read(bus, "j1", "j1.a")
        assert found == [Entry(n + 1, "j1.a", b"%d" % n) for n in range(0, 10, 2)]
        everything = await journal.read(bus, "j1", "j1.*")
        assert [entry.seq for entry in everything] == list(range(1, 11))

    with_bus(nats_url, test)


def test_reading_goes_on_after_a_sequence(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "j2")
        for number in range(6):
            await bus.store("j2.a", b"%d" % number)
        assert [e.seq for e in await journal.read(bus, "j2", "j2.a", after_seq=4)] == [5, 6]
        assert await journal.read(bus, "j2", "j2.a", after_seq=6) == []
        assert await journal.read(bus, "j2", "j2.a", after_seq=99) == []

    with_bus(nats_url, test)


def test_nothing_under_a_subject_is_an_empty_list(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "j3")
        assert await journal.read(bus, "j3", "j3.a") == []
        await bus.store("j3.b", b"")
        assert await journal.read(bus, "j3", "j3.a") == []

    with_bus(nats_url, test)


@pytest.mark.parametrize("count", [999, 1000, 1001, 2500])
def test_a_log_longer_than_a_batch_is_read_whole(nats_url: str, count: int) -> None:
    async def test(bus: Bus) -> None:
        name = f"j4_{count}"
        await stream(bus, name)
        answers = [await bus.store_soon(f"{name}.a", b"%d" % n) for n in range(count)]
        await asyncio.gather(*answers)
        found = await journal.read(bus, name, f"{name}.a")
        assert [entry.data for entry in found] == [b"%d" % n for n in range(count)]

    with_bus(nats_url, test)


def test_an_empty_message_is_an_entry(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "j5")
        await bus.store("j5.a", b"")
        assert await journal.read(bus, "j5", "j5.a") == [Entry(1, "j5.a", b"")]

    with_bus(nats_url, test)


def test_a_deleted_key_is_marked_so(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "j6")
        await bus.store("j6.a", b"1")
        await bus.store("j6.a", b"", headers={"KV-Operation": "DEL"})
        assert [entry.deleted for entry in await journal.read(bus, "j6", "j6.a")] == [False, True]

    with_bus(nats_url, test)


def test_a_stream_that_is_not_there_is_an_error_at_once(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        with pytest.raises(BrokerAway):
            await journal.read(bus, "never", "never.a")

    with_bus(nats_url, test)


def test_a_payload_near_the_brokers_limit_is_read_back(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "j7")
        data = bytes(bus.payload_bytes_max - 1024)
        for _ in range(3):
            await bus.store("j7.a", data)
        assert [len(entry.data) for entry in await journal.read(bus, "j7", "j7.a")] == [
            len(data)
        ] * 3

    with_bus(nats_url, test)


def test_a_walk_holds_few_messages_at_a_time_and_may_be_left(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "j_walk")
        big = bytes(900_000)
        for _ in range(20):  # more than one batch's bytes
            await bus.store("j_walk.a", big)
        everything = [message async for message in journal.walk(bus, "j_walk", "j_walk.a")]
        assert [len(message.data) for message in everything] == [len(big)] * 20
        async with aclosing(journal.walk(bus, "j_walk", "j_walk.a", batch=3)) as messages:
            async for message in messages:
                if (message.headers or {})[journal.SEQUENCE] == "5":
                    break
        assert (message.headers or {})[journal.SUBJECT] == "j_walk.a"

    with_bus(nats_url, test)


def test_pages_are_of_about_the_size_asked_for_and_make_the_whole(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "j9")
        for number in range(50):
            await bus.store("j9.a", b"%05d" % number * 200)
        found: list[Entry] = []
        pages, more = 0, True
        while more:
            after_seq = found[-1].seq if found else 0
            page, more = await journal.read_page(
                bus, "j9", "j9.a", after_seq=after_seq, bytes_max=5000
            )
            assert 1 <= len(page) <= 6
            found += page
            pages += 1
        assert found == await journal.read(bus, "j9", "j9.a")
        assert pages >= 9

    with_bus(nats_url, test)


def test_a_message_larger_than_a_page_is_a_page(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "j10")
        for _ in range(3):
            await bus.store("j10.a", b"x" * 9000)
        page, more = await journal.read_page(bus, "j10", "j10.a", after_seq=0, bytes_max=1000)
        assert len(page) == 1
        assert more

    with_bus(nats_url, test)


def test_a_reading_ends_with_the_connection_that_it_was_asked_on(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "API_TIMEOUT_S", 60.0)

    async def test(bus: Bus) -> None:
        asked: list[Message] = []

        async def silent(message: Message) -> None:
            asked.append(message)

        await bus.subscribe("$JS.API.DIRECT.GET.silent", silent)
        reading = asyncio.create_task(journal.read(bus, "silent", "a"))
        await until(lambda: asked)
        begun_s = time.monotonic()
        await asyncio.to_thread(own_nats.stop)
        with pytest.raises(BrokerAway):
            await reading
        assert time.monotonic() - begun_s < 30

    with_bus(own_nats.url, test)
