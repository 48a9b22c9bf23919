"""The door to NATS: it says at once when the broker is away, and buffers nothing."""

import asyncio
import time

import pytest

from headrace.bus import (
    BrokerAway,
    BrokerRefused,
    Bus,
    BusSettings,
    Message,
    Stored,
    connect,
    connection,
    stored,
)
from headrace.messages import NobodyAnswers
from tests.broker import with_bus
from tests.servers import NatsServer, free_port
from tests.waiting import until

LONG_S = 60.0
"""What nothing here waits for."""


async def stream(bus: Bus, name: str, **more: object) -> None:
    """Create a stream with the subjects below its own name."""
    config = {"name": name, "subjects": [f"{name}.>"], "storage": "memory"} | more
    await bus.api(f"STREAM.CREATE.{name}", config)


def collecting(into: list[bytes]) -> object:
    async def take(message: Message) -> None:
        into.append(message.data)

    return take


def test_a_publish_reaches_a_subscriber(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        heard: list[tuple[str, bytes]] = []

        async def take(message: Message) -> None:
            heard.append((message.subject, message.data))

        subscription = await bus.subscribe("hear.*", take)
        await bus.publish("hear.this", b"1")
        await bus.publish("other.this", b"2")
        await until(lambda: heard)
        await subscription.unsubscribe()
        await bus.publish("hear.this", b"3")
        await bus.api("INFO")  # a round trip: whatever was to come has come
        assert heard == [("hear.this", b"1")]

    with_bus(nats_url, test)


def test_an_answer_comes_to_the_one_who_asked(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        async def echo(message: Message) -> None:
            await bus.publish(message.reply, b"re:" + message.data)

        await bus.subscribe("echo", echo)
        answers = await asyncio.gather(
            *(bus.request("echo", b"%d" % number, timeout_s=15) for number in range(50))
        )
        assert answers == [b"re:%d" % number for number in range(50)]

    with_bus(nats_url, test)


def test_a_question_nobody_answers_fails_at_once(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        with pytest.raises(NobodyAnswers):  # and not that it took too long
            await bus.store("nobody.listens", b"", timeout_s=60)

    with_bus(nats_url, test)


def test_a_silent_service_is_given_up_after_its_time(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await bus.subscribe("silent", collecting([]))  # type: ignore[arg-type]
        begun_s = time.monotonic()
        with pytest.raises(BrokerAway, match="silent"):
            await bus.request("silent", b"", timeout_s=0.2)
        assert 0.15 < time.monotonic() - begun_s < 15

    with_bus(nats_url, test)


def test_a_stored_message_has_its_sequence_and_a_repeat_is_known(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "stored")
        headers = {"Nats-Msg-Id": "a"}
        assert await bus.store("stored.a", b"1", headers=headers) == Stored(1, False)
        assert await bus.store("stored.b", b"2") == Stored(2, False)
        assert await bus.store("stored.a", b"1", headers=headers) == Stored(1, True)
        answer = await bus.store_soon("stored.c", b"3")
        await answer
        assert stored(answer) == Stored(3, False)

    with_bus(nats_url, test)


def test_a_stream_that_says_no_is_a_refusal_with_its_code(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "full", max_msgs=1, discard="new")
        await bus.store("full.a", b"1")
        with pytest.raises(BrokerRefused, match="maximum messages") as refused:
            await bus.store("full.b", b"2")
        assert (refused.value.code, refused.value.status) == (10077, 503)
        with pytest.raises(BrokerRefused) as unknown:
            await bus.api("STREAM.INFO.never_made")
        assert (unknown.value.code, unknown.value.status) == (10059, 404)

    with_bus(nats_url, test)


def test_a_purge_deletes_what_its_filter_names_and_says_how_much(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        await stream(bus, "purged")
        for name in ("a.1", "a.2", "b.1"):
            await bus.store(f"purged.{name}", b"")
        assert await bus.purge("purged", "purged.a.*") == 2
        assert await bus.purge("purged", "purged.a.*") == 0
        assert (await bus.api("STREAM.INFO.purged"))["state"]["messages"] == 1

    with_bus(nats_url, test)


def test_a_file_in_the_object_store_comes_back_whole(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        config = {"name": "OBJ_files", "subjects": ["$O.files.C.>", "$O.files.M.>"]}
        await bus.api("STREAM.CREATE.OBJ_files", config | {"allow_rollup_hdrs": True})
        content = bytes(range(256)) * 2000
        await bus.put_blob("files", "a/b.bin", content)
        assert await bus.get_blob("files", "a/b.bin") == content
        assert await bus.get_blob("files", "none") is None
        with pytest.raises(BrokerRefused):
            await bus.put_blob("no_such_bucket", "a", b"")

    with_bus(nats_url, test)


def test_connecting_to_nobody_ends_after_its_time() -> None:
    async def test() -> None:
        begun_s = time.monotonic()
        with pytest.raises(BrokerAway):
            await connect(BusSettings(f"nats://127.0.0.1:{free_port()}"), name="t", timeout_s=0.5)
        assert time.monotonic() - begun_s < 15

    asyncio.run(test())


def test_connecting_waits_for_a_broker_that_comes_late(own_nats: NatsServer) -> None:
    async def test() -> None:
        own_nats.stop()
        connecting = asyncio.create_task(
            connect(BusSettings(own_nats.url), name="t", timeout_s=LONG_S)
        )
        await asyncio.to_thread(own_nats.start)
        bus = await connecting
        assert bus.connected
        await bus.close()

    asyncio.run(test())


def test_a_file_whose_chunks_are_gone_is_not_waited_for(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        config = {"name": "OBJ_holes", "subjects": ["$O.holes.C.>", "$O.holes.M.>"]}
        await bus.api("STREAM.CREATE.OBJ_holes", config | {"allow_rollup_hdrs": True})
        await bus.put_blob("holes", "a", b"content")
        assert await bus.purge("OBJ_holes", "$O.holes.C.>") == 1
        with pytest.raises(BrokerAway):
            await bus.get_blob("holes", "a", timeout_s=0.3)

    with_bus(nats_url, test)


def test_while_the_broker_is_away_everything_fails_at_once(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await asyncio.to_thread(own_nats.stop)
        await until(lambda: not bus.connected)
        asked = [
            lambda: bus.publish("a", b""),
            lambda: bus.store("a", b"", timeout_s=LONG_S),
            lambda: bus.store_soon("a", b""),
            lambda: bus.request("a", b"", timeout_s=LONG_S),
            lambda: bus.api("INFO", timeout_s=LONG_S),
            lambda: bus.purge("a", "a"),
            lambda: bus.get_blob("a", "a", timeout_s=LONG_S),
            lambda: bus.put_blob("a", "a", b""),
        ]
        for ask in asked:
            async with asyncio.timeout(LONG_S / 20):
                with pytest.raises(BrokerAway):
                    await ask()

    with_bus(own_nats.url, test)


def test_what_was_refused_while_away_is_not_sent_later(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        heard: list[bytes] = []
        await bus.subscribe("kept", collecting(heard))  # type: ignore[arg-type]
        await asyncio.to_thread(own_nats.stop)
        await until(lambda: not bus.connected)
        for _ in range(10):
            with pytest.raises(BrokerAway):
                await bus.publish("kept", b"away")
        await asyncio.to_thread(own_nats.start)
        await until(lambda: bus.connected)
        await bus.publish("kept", b"back")
        await until(lambda: heard)
        assert heard == [b"back"]

    with_bus(own_nats.url, test)


def test_a_question_on_a_connection_that_breaks_fails_with_it(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await bus.subscribe("silent", collecting([]))  # type: ignore[arg-type]
        asking = asyncio.create_task(bus.request("silent", b"", timeout_s=30))
        soon = await bus.store_soon("silent", b"")
        await bus.api("INFO")
        begun_s = time.monotonic()
        await asyncio.to_thread(own_nats.stop)
        for answer in (asking, soon):
            with pytest.raises(BrokerAway):
                await answer
        assert time.monotonic() - begun_s < 20

    with_bus(own_nats.url, test)


def test_a_restart_heals_the_connection_its_subscriptions_and_its_watchers(
    own_nats: NatsServer,
) -> None:
    async def test() -> None:
        async with (
            connection(BusSettings(own_nats.url), name="one", timeout_s=15) as one,
            connection(BusSettings(own_nats.url), name="two", timeout_s=15) as two,
        ):
            await stream(one, "kept", storage="file")
            await one.store("kept.a", b"1")
            heard: list[bytes] = []
            told: list[str] = []

            async def back() -> None:
                told.append("back")

            await one.subscribe("hear", collecting(heard))  # type: ignore[arg-type]
            one.on_reconnect(back)
            await asyncio.to_thread(own_nats.stop)
            await until(lambda: not one.connected and not two.connected)
            assert told == []
            await asyncio.to_thread(own_nats.start)
            await until(lambda: one.connected and two.connected and told)
            await one.api("INFO")  # the broker knows of its subscriptions again
            await two.publish("hear", b"again")
            await until(lambda: heard)
            assert (told, heard) == (["back"], [b"again"])
            assert (await one.api("STREAM.INFO.kept"))["state"]["messages"] == 1
            assert (await one.store("kept.b", b"2")).seq == 2

    asyncio.run(test())


def test_a_connection_closes_without_fault_while_the_broker_is_away(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await asyncio.to_thread(own_nats.stop)
        await until(lambda: not bus.connected)
        async with asyncio.timeout(15):
            await bus.close()

    with_bus(own_nats.url, test)


def test_the_payload_limit_is_the_brokers(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        assert bus.payload_bytes_max == 1024 * 1024

    with_bus(nats_url, test)


def test_a_listener_hears_every_message_in_order_even_after_one_it_failed_on(
    nats_url: str,
) -> None:
    async def test(bus: Bus) -> None:
        heard: list[bytes] = []

        def take(message: Message) -> None:
            heard.append(message.data)
            if message.data == b"7":
                raise ValueError("a fault of the listener's")

        await bus.listen("tokens.>", take)
        for number in range(500):
            await bus.publish(f"tokens.{number % 3}", b"%d" % number)
        await until(lambda: len(heard) == 500)
        assert heard == [b"%d" % number for number in range(500)]

    with_bus(nats_url, test)
