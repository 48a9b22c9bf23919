"""Streams and consumers as the design's table lists them, asked of a real server."""

from typing import Any

import pytest

from headrace import topology
from headrace.bus import BrokerRefused, Bus
from headrace.topology import Sizes
from tests.broker import with_bus
from tests.servers import NatsServer

S = 1_000_000_000  # JetStream counts in nanoseconds
GIB = 1024**3

# From the design: name, kind, subjects or keys, settings.
STREAMS: dict[str, dict[str, Any]] = {
    "REQUESTS": {
        "subjects": ["requests.>"],
        "retention": "workqueue",
        "storage": "file",
        "max_msgs_per_subject": 1,
        "discard": "new",
        "discard_new_per_subject": True,
        "max_msgs": 1_000_000,
        "max_bytes": 4 * GIB,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "num_replicas": 1,
    },
    "REPLIES": {
        "subjects": ["replies.>"],
        "retention": "limits",
        "storage": "file",
        "max_age": 15 * 60 * S,
        "discard": "old",
        "num_replicas": 1,
    },
    "DEADLETTERS": {
        "subjects": ["deadletters.>"],
        "retention": "limits",
        "storage": "file",
        "max_age": 7 * 24 * 3600 * S,
        "max_bytes": GIB,
        "num_replicas": 1,
    },
}
BUCKETS = ["workers", "models", "tenants", "limits", "responses"]


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with the topology and a model's consumers."""
    server = NatsServer(tmp_path_factory.mktemp("topology"))
    server.start()

    async def apply(bus: Bus) -> None:
        await topology.apply(bus)
        await topology.apply_model(bus, "org/m.1", partitions=4)

    with_bus(server.url, apply)
    yield server
    server.stop()


def info(server: NatsServer, verb: str) -> dict[str, Any]:
    async def ask(bus: Bus) -> dict[str, Any]:
        return await bus.api(verb)

    return with_bus(server.url, ask)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_shows_every_setting_of_the_design(applied: NatsServer, name: str) -> None:
    config = info(applied, f"STREAM.INFO.{name}")["config"]
    for setting, value in STREAMS[name].items():
        assert config.get(setting) == value, setting


def test_requests_remember_ids_for_at_least_two_minutes(applied: NatsServer) -> None:
    assert info(applied, "STREAM.INFO.REQUESTS")["config"]["duplicate_window"] >= 120 * S


def test_replies_are_bounded_in_bytes(applied: NatsServer) -> None:
    assert info(applied, "STREAM.INFO.REPLIES")["config"]["max_bytes"] > 0


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_bucket_is_a_key_value_bucket(applied: NatsServer, bucket: str) -> None:
    config = info(applied, f"STREAM.INFO.KV_{bucket}")["config"]
    assert config["subjects"] == [f"$KV.{bucket}.>"]
    assert config["max_msgs_per_subject"] == 1
    assert config["allow_rollup_hdrs"] is True
    assert config["deny_delete"] is True


def test_kept_answers_are_bounded_in_time_and_bytes_and_the_oldest_go_first(
    applied: NatsServer,
) -> None:
    config = info(applied, "STREAM.INFO.KV_responses")["config"]
    assert config["max_age"] == 24 * 3600 * S
    assert config["max_bytes"] == GIB
    assert config["discard"] == "old"


def test_entries_of_workers_expire_with_a_marker(applied: NatsServer) -> None:
    config = info(applied, "STREAM.INFO.KV_workers")["config"]
    assert config["subject_delete_marker_ttl"] >= S
    assert 2 * S <= config["max_age"] <= 10 * S


def test_the_blobs_are_an_object_store(applied: NatsServer) -> None:
    config = info(applied, "STREAM.INFO.OBJ_blobs")["config"]
    assert sorted(config["subjects"]) == ["$O.blobs.C.>", "$O.blobs.M.>"]


@pytest.mark.parametrize("lane", ["online", "batch"])
@pytest.mark.parametrize("partition", range(4))
def test_a_consumer_shows_every_setting_of_the_design(
    applied: NatsServer, lane: str, partition: int
) -> None:
    name = f"{lane}-org=2Fm=2E1-{partition}"
    config = info(applied, f"CONSUMER.INFO.REQUESTS.{name}")["config"]
    expected = {
        "durable_name": name,
        "filter_subject": f"requests.{lane}.org=2Fm=2E1.{partition}.>",
        "ack_policy": "explicit",
        "ack_wait": 3 * S,
        "max_deliver": -1,
        "max_waiting": 4096,
        "max_ack_pending": 10_000,
        "priority_policy": "prioritized",
    }
    assert {setting: config.get(setting) for setting in expected} == expected
    assert len(config["priority_groups"]) == 1
    assert "deliver_subject" not in config  # it is pulled from


def test_a_model_has_one_consumer_per_lane_and_partition(applied: NatsServer) -> None:
    names = info(applied, "CONSUMER.NAMES.REQUESTS")["consumers"]
    assert sorted(names) == sorted(
        f"{lane}-org=2Fm=2E1-{partition}" for lane in ("online", "batch") for partition in range(4)
    )


def test_applying_twice_changes_nothing(applied: NatsServer) -> None:
    async def everything(bus: Bus) -> list[Any]:
        names = (await bus.api("STREAM.NAMES"))["streams"]
        found = [(await bus.api(f"STREAM.INFO.{name}")) for name in sorted(names)]
        names = (await bus.api("CONSUMER.NAMES.REQUESTS"))["consumers"]
        found += [(await bus.api(f"CONSUMER.INFO.REQUESTS.{name}")) for name in sorted(names)]
        return [(each["config"], each["created"]) for each in found]

    async def test(bus: Bus) -> None:
        before = await everything(bus)
        names = await topology.apply(bus)
        await topology.apply_model(bus, "org/m.1", partitions=4)
        assert await everything(bus) == before
        assert len(before) == len(names) + 8

    with_bus(applied.url, test)


def test_applying_keeps_what_is_stored(applied: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await bus.store("requests.online.org=2Fm=2E1.1.t.r", b"kept")
        await topology.apply(bus)
        await topology.apply_model(bus, "org/m.1", partitions=4)
        state = (await bus.api("STREAM.INFO.REQUESTS"))["state"]
        assert state["messages"] == 1
        await bus.purge("REQUESTS", "requests.>")

    with_bus(applied.url, test)


def test_other_sizes_are_applied_to_streams_that_are_there(applied: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus, Sizes(requests_max=7, requests_bytes_max=GIB))
        config = (await bus.api("STREAM.INFO.REQUESTS"))["config"]
        assert (config["max_msgs"], config["max_bytes"]) == (7, GIB)
        await topology.apply(bus, Sizes())

    with_bus(applied.url, test)


@pytest.mark.parametrize("replicas", [None, 1])
def test_what_an_operator_chose_stays_where_no_sizes_are_named(
    own_nats: NatsServer, replicas: int | None
) -> None:
    own = {"max_bytes": 8 * GIB, "storage": "memory"}

    async def test(bus: Bus) -> None:
        [config] = [each for each in topology.streams(Sizes()) if each["name"] == "REPLIES"]
        await bus.api("STREAM.CREATE.REPLIES", config | own | {"max_age": S})
        await topology.apply(bus, replicas=replicas)
        found = (await bus.api("STREAM.INFO.REPLIES"))["config"]
        assert {name: found[name] for name in own} == own
        assert found["max_age"] == config["max_age"]

    with_bus(own_nats.url, test)


def test_a_change_that_the_broker_cannot_make_is_refused(applied: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        with pytest.raises(BrokerRefused, match="storage"):
            await topology.apply(bus, Sizes(replies_storage="memory"))

    with_bus(applied.url, test)


def test_a_request_stands_in_the_queue_once_whatever_its_message_id(applied: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        subject = "requests.online.org=2Fm=2E1.2.t.r"
        await bus.store(subject, b"", headers={"Nats-Msg-Id": "r/1"})
        with pytest.raises(BrokerRefused, match="per subject"):
            await bus.store(subject, b"", headers={"Nats-Msg-Id": "r/2"})
        await bus.purge("REQUESTS", "requests.>")

    with_bus(applied.url, test)
