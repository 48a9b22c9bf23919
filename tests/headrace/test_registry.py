"""Who is alive: heard by everyone, forgotten when silent, kept through a broker's restart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import registry, topology
from headrace.bus import BrokerRefused, Bus, BusSettings, connection
from headrace.registry import Registry, Roster
from schemas import subjects
from schemas.model import ModelCard, WorkerEntry
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until

TTL_S = 4.0


class Entry(msgspec.Struct, frozen=True):
    """A heartbeat in these tests."""

    load: int


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_an_entry_is_news_when_it_is_new_or_differs() -> None:
    roster: Roster[Entry] = Roster(TTL_S)
    assert roster.heard("a", Entry(1), now_s=0)
    assert not roster.heard("a", Entry(1), now_s=1)
    assert roster.heard("a", Entry(2), now_s=2)
    assert roster.entries() == {"a": Entry(2)}


def test_silence_counts_after_two_lifetimes_and_not_before() -> None:
    roster: Roster[Entry] = Roster(TTL_S)
    roster.heard("a", Entry(1), now_s=0)
    roster.heard("b", Entry(1), now_s=5)
    assert roster.prune(now_s=2 * TTL_S) == []
    assert roster.prune(now_s=2 * TTL_S + 0.1) == ["a"]
    assert roster.entries() == {"b": Entry(1)}


def test_a_reconnect_gives_everyone_a_fresh_lifetime() -> None:
    roster: Roster[Entry] = Roster(TTL_S)
    roster.heard("a", Entry(1), now_s=0)
    roster.reconnected(now_s=60)
    assert roster.prune(now_s=60 + 2 * TTL_S) == []
    assert roster.prune(now_s=60 + 2 * TTL_S + 0.1) == ["a"]


def test_who_says_goodbye_is_gone_at_once() -> None:
    roster: Roster[Entry] = Roster(TTL_S)
    roster.heard("a", Entry(1), now_s=0)
    assert roster.gone("a")
    assert not roster.gone("a")
    assert roster.entries() == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5)), max_size=40))
def test_nobody_who_speaks_within_two_lifetimes_is_ever_forgotten(
    beats: list[tuple[str, float]],
) -> None:
    roster: Roster[Entry] = Roster(TTL_S)
    last_s: dict[str, float] = {}
    now_s = 0.0
    for name, later_s in beats:
        now_s += later_s
        roster.prune(now_s=now_s)
        assert set(roster.entries()) == {n for n, at in last_s.items() if now_s - at <= 2 * TTL_S}
        last_s = {n: last_s[n] for n in roster.entries()} | {name: now_s}
        roster.heard(name, Entry(0), now_s=now_s)


@asynccontextmanager
async def listening(bus: Bus, bucket: str, clock: Clock) -> AsyncIterator[Registry[Entry]]:
    found: Registry[Entry] = Registry(bus, bucket, Entry, ttl_s=TTL_S, clock=clock)
    await found.start()
    yield found


async def put(bus: Bus, bucket: str, name: str, entry: Entry) -> None:
    """Put an entry as `announce` does, and wait until it is stored."""
    await bus.store(f"$KV.{bucket}.{subjects.escape(name)}", msgspec.json.encode(entry))


async def make_bucket(bus: Bus, bucket: str, **more: object) -> None:
    config = {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "max_msgs_per_subject": 1,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
    }
    await bus.api(f"STREAM.CREATE.KV_{bucket}", config | more)


def test_what_is_there_is_read_and_what_comes_is_heard(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await make_bucket(bus, "r1")
        await put(bus, "r1", "org/a.1", Entry(1))
        async with listening(bus, "r1", Clock()) as found:
            assert found.entries == {"org/a.1": Entry(1)}
            await registry.announce(bus, "r1", "b", Entry(2))
            await registry.announce(bus, "r1", "org/a.1", Entry(3))
            expected = {"org/a.1": Entry(3), "b": Entry(2)}
            await until(lambda: found.entries == expected)

    with_bus(nats_url, test)


def test_who_withdraws_is_gone_for_listeners_now_and_later(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await make_bucket(bus, "r2")
        await put(bus, "r2", "a", Entry(1))
        async with listening(bus, "r2", Clock()) as found:
            await registry.withdraw(bus, "r2", "a")
            await until(lambda: not found.entries)
        async with listening(bus, "r2", Clock()) as late:
            assert late.entries == {}

    with_bus(nats_url, test)


def test_the_silent_are_forgotten_and_the_listener_is_told(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await make_bucket(bus, "r3")
        await put(bus, "r3", "a", Entry(1))
        clock, changes = Clock(), []
        found: Registry[Entry] = Registry(
            bus, "r3", Entry, ttl_s=TTL_S, clock=clock, on_change=lambda: changes.append(1)
        )
        await found.start()
        clock.now_s += 2 * TTL_S
        found.tick()
        assert (len(found.entries), len(changes)) == (1, 1)
        clock.now_s += 0.1
        found.tick()
        assert (len(found.entries), len(changes)) == (0, 2)

    with_bus(nats_url, test)


def test_an_entry_that_cannot_be_read_is_passed_over(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await make_bucket(bus, "r4")
        await bus.store("$KV.r4.bad", b"{")
        await bus.store("$KV.r4.=zz", b'{"load":1}')
        async with listening(bus, "r4", Clock()) as found:
            await bus.publish("$KV.r4.worse", b'{"load":"x"}')
            await registry.announce(bus, "r4", "good", Entry(1))
            await until(lambda: found.entries)
            assert found.entries == {"good": Entry(1)}

    with_bus(nats_url, test)


@pytest.mark.slow
def test_an_entry_expires_in_the_bucket_and_a_marker_is_no_entry(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        ttl = 8 * topology.NANOSECONDS
        marked = {"max_age": ttl, "allow_msg_ttl": True, "subject_delete_marker_ttl": ttl}
        await make_bucket(bus, "r5", **marked)
        await put(bus, "r5", "a", Entry(1))

        async def expired() -> bool:
            async with listening(bus, "r5", Clock()) as found:
                return not found.entries

        assert not await expired()
        await until(expired)

    with_bus(nats_url, test)


def test_a_broker_that_restarts_makes_nobody_forgotten(own_nats: NatsServer) -> None:
    async def test() -> None:
        settings = BusSettings(own_nats.url)
        async with (
            connection(settings, name="one", timeout_s=15) as one,
            connection(settings, name="two", timeout_s=15) as two,
        ):
            await make_bucket(one, "r6")
            await put(two, "r6", "a", Entry(1))
            clock = Clock()
            async with listening(one, "r6", clock) as found:
                await asyncio.to_thread(own_nats.stop)
                await until(lambda: not one.connected and not two.connected)
                clock.now_s += 100
                found.tick()  # away: absence does not count
                assert found.entries == {"a": Entry(1)}
                await asyncio.to_thread(own_nats.start)
                await until(lambda: one.connected and two.connected)
                await registry.announce(two, "r6", "b", Entry(2))
                await until(lambda: len(found.entries) == 2)
                found.tick()
                assert found.entries == {"a": Entry(1), "b": Entry(2)}

    asyncio.run(test())


def test_a_published_card_comes_back_with_its_files(own_nats: NatsServer) -> None:
    files = {"tokenizer.json": b"{}" * 100_000, "chat_template.jinja": "é".encode()}
    card = ModelCard(name="org/m.1", created_s=5, max_model_len=99, partitions=2, files={})

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        assert await registry.read_card(bus, "org/m.1") is None
        published = await registry.publish_card(bus, card, files)
        assert set(published.files) == set(files)
        assert await registry.read_card(bus, "org/m.1") == published
        assert await registry.load_files(bus, published) == files
        assert await registry.publish_card(bus, card, files) == published
        consumers = (await bus.api("CONSUMER.NAMES.REQUESTS"))["consumers"]
        assert len(consumers) == 4
        lost = msgspec.structs.replace(published, files={"tokenizer.json": "0" * 64})
        with pytest.raises(BrokerRefused, match=r"tokenizer\.json"):
            await registry.load_files(bus, lost)

    with_bus(own_nats.url, test)


def test_a_workers_heartbeat_can_be_read_with_any_nats_client(own_nats: NatsServer) -> None:
    entry = WorkerEntry(name="w.0", model="m", slots=4, running=2)

    async def test(bus: Bus) -> None:
        await topology.apply(bus)
        await registry.announce(bus, "workers", "w.0", entry)

        async def last() -> bytes | None:
            found = await bus.api("STREAM.INFO.KV_workers", {"subjects_filter": ">"})
            return found["state"].get("subjects")

        assert await until(last) == {"$KV.workers.w=2E0": 1}
        raw = await bus.request("$JS.API.DIRECT.GET.KV_workers.$KV.workers.w=2E0", b"", timeout_s=9)
        assert msgspec.json.decode(raw) == {"name": "w.0", "model": "m", "slots": 4, "running": 2}

    with_bus(own_nats.url, test)
