"""Putting a request into the queue: the broker's word, and what its refusals mean."""

import asyncio
import base64
import math
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace import topology
from headrace.bus import Bus, BusSettings, connection
from headrace.topology import Sizes
from ingress.dispatch import ACCEPT_TIMEOUT_S, dispatch
from schemas.errors import BrokerUnavailable, QueueFull, RequestTooLarge
from schemas.subjects import RequestSubject, new_request_id
from schemas.wire import Envelope, Sampling, Shape, decode_envelope, pack_tokens
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the topology."""
    found = NatsServer(tmp_path_factory.mktemp("dispatch"))
    found.start()
    yield found.url
    found.stop()


@pytest.fixture
def queue(server: str) -> str:
    """The server, its queue empty and of its usual size."""

    async def empty(bus: Bus) -> None:
        await topology.apply(bus, Sizes())
        await bus.purge("REQUESTS", "requests.>")

    with_bus(server, empty)
    return server


def request(**more: Any) -> tuple[RequestSubject, Envelope]:
    identity = new_request_id()
    subject = RequestSubject("online", "m", 3, "t", identity)
    envelope = Envelope(
        request=identity,
        tenant="t",
        model="m",
        reply=f"replies.s.t.{identity}",
        prompt=pack_tokens([1, 2]),
        sampling=Sampling(max_tokens=1),
        shape=Shape("chat", "m", 5, False, 1, False),
        deadline_s=time.time() + 600,
    )
    return subject, msgspec.structs.replace(envelope, **more)


async def queued(bus: Bus) -> int:
    return int((await bus.api("STREAM.INFO.REQUESTS"))["state"]["messages"])


async def stored(bus: Bus) -> int:
    return int((await bus.api("STREAM.INFO.REQUESTS"))["state"]["last_seq"])


def test_a_request_stands_in_the_queue_under_its_subject(queue: str) -> None:
    async def test(bus: Bus) -> None:
        subject, envelope = request()
        await dispatch(bus, subject, envelope)
        found = await bus.request(f"$JS.API.DIRECT.GET.REQUESTS.{subject}", b"", timeout_s=10)
        assert decode_envelope(found) == envelope

    with_bus(queue, test)


def test_a_request_carries_its_message_id_and_time_to_live(queue: str) -> None:
    async def test(bus: Bus) -> None:
        deadline_s = time.time() + 100
        subject, envelope = request(deadline_s=deadline_s)
        await dispatch(bus, subject, envelope)
        left_s = deadline_s - time.time()
        found = await bus.api("STREAM.MSG.GET.REQUESTS", {"last_by_subj": str(subject)})
        lines = base64.b64decode(found["message"]["hdrs"]).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if ": " in line)
        assert headers["Nats-Msg-Id"] == f"{envelope.request}/1"
        assert math.ceil(left_s) <= int(headers["Nats-TTL"]) <= 101

    with_bus(queue, test)


@pytest.mark.slow
def test_a_request_expires_with_its_deadline(queue: str) -> None:
    async def test(bus: Bus) -> None:
        before = await stored(bus)
        await dispatch(bus, *request(deadline_s=time.time() + 10))
        assert await stored(bus) == before + 1

        async def empty() -> bool:
            return await queued(bus) == 0

        await until(empty, within_s=30)

    with_bus(queue, test)


def test_the_same_id_twice_is_in_the_queue_once(queue: str) -> None:
    async def test(bus: Bus) -> None:
        subject, envelope = request()
        await dispatch(bus, subject, envelope)
        await dispatch(bus, subject, envelope)
        assert await queued(bus) == 1

    with_bus(queue, test)


def test_a_full_queue_is_429_at_once_and_takes_again_when_there_is_room(queue: str) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus, Sizes(requests_max=3))
        subjects = []
        for _ in range(3):
            subject, envelope = request()
            await dispatch(bus, subject, envelope)
            subjects.append(subject)
        begun_s = time.monotonic()
        with pytest.raises(QueueFull) as refused:
            await dispatch(bus, *request())
        assert time.monotonic() - begun_s < ACCEPT_TIMEOUT_S / 2
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert (refused.value.retry_after_s or 0) >= 1
        assert await queued(bus) == 3
        await bus.purge("REQUESTS", str(subjects[0]))
        await dispatch(bus, *request())
        assert await queued(bus) == 3

    with_bus(queue, test)


def test_a_queue_full_of_bytes_is_429_too(queue: str) -> None:
    async def test(bus: Bus) -> None:
        await topology.apply(bus, Sizes(requests_bytes_max=200_000))
        await dispatch(bus, *request(prompt=bytes(150_000)))
        with pytest.raises(QueueFull):
            await dispatch(bus, *request(prompt=bytes(150_000)))

    with_bus(queue, test)


def test_a_request_over_the_payload_limit_is_413_naming_it(queue: str) -> None:
    async def test(bus: Bus) -> None:
        with pytest.raises(RequestTooLarge, match=str(1024 * 1024)) as refused:
            await dispatch(bus, *request(prompt=bytes(1024 * 1024)))
        assert refused.value.status == 413
        assert bus.connected
        assert await queued(bus) == 0

    with_bus(queue, test)


def test_the_largest_request_that_is_not_refused_is_taken(queue: str) -> None:
    async def test(bus: Bus) -> None:
        subject, envelope = request()
        size = bus.payload_bytes_max
        while True:
            try:
                await dispatch(bus, subject, msgspec.structs.replace(envelope, prompt=bytes(size)))
                break
            except RequestTooLarge:
                size -= 64
        assert size > bus.payload_bytes_max - 2048
        assert bus.connected
        assert await queued(bus) == 1

    with_bus(queue, test)


def test_without_the_stream_it_is_503_at_once(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        begun_s = time.monotonic()
        with pytest.raises(BrokerUnavailable) as refused:
            await dispatch(bus, *request())
        assert time.monotonic() - begun_s < ACCEPT_TIMEOUT_S / 2
        assert (refused.value.status, refused.value.code) == (503, "broker_unavailable")

    with_bus(own_nats.url, test)


def test_with_the_broker_away_it_is_503_at_once_and_nothing_comes_later(
    own_nats: NatsServer,
) -> None:
    async def test() -> None:
        async with connection(BusSettings(own_nats.url), name="t", timeout_s=30) as bus:
            await topology.apply(bus)
            await asyncio.to_thread(own_nats.stop)
            await until(lambda: not bus.connected)
            begun_s = time.monotonic()
            with pytest.raises(BrokerUnavailable):
                await dispatch(bus, *request())
            assert time.monotonic() - begun_s < ACCEPT_TIMEOUT_S / 2
            await asyncio.to_thread(own_nats.start)
            await until(lambda: bus.connected)
            assert await queued(bus) == 0

    asyncio.run(test())
