"""A further reader of a reply: from the log, or from what is kept of it for longer."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import topology
from headrace.bus import Bus
from headrace.kept import keep
from schemas.errors import Gone, NotFound
from schemas.reply import Complete
from schemas.subjects import ReplySubject, new_request_id
from schemas.wire import Finished, Frame, Piece, Shape, Started, Tokens, Usage, encode_frame
from streamer.attach import attach
from streamer.buffer import LATE_READ_S
from streamer.mailbox import Mailbox
from streamer.relay import Relay
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.streamer.test_relay import Client

LONG = 3000
STARTED = Started(7, "w", 0, Shape("completion", "m", 5, False, 1, False))
PIECES = tuple(Piece(0, f"{seq} " + "x" * 100, (seq,)) for seq in range(LONG))
FRAMES: list[Frame] = [
    STARTED,
    *(Tokens(7, seq, PIECES[seq : seq + 100]) for seq in range(0, LONG, 100)),
    Finished(7, LONG, (), ("stop",), Usage(1, LONG, 0), {}),
]
END = Finished(7, 0, (), ("stop",), Usage(1, 0, 0), {})
RAW = [encode_frame(frame) for frame in FRAMES]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = NatsServer(tmp_path_factory.mktemp("attach"))
    server.start()
    with_bus(server.url, topology.apply)
    yield server.url
    server.stop()


async def read(bus: Bus, request: str) -> bytes:
    """Attach to a reply and return the bytes of its stream."""
    mailbox = Mailbox(bus, f"s-{request[-8:]}")
    reply = await attach(bus, mailbox, tenant="t", request=request)
    client = Client()
    await Relay(mailbox, reply, stream=True, headers={})({}, client.receive, client.send)
    assert mailbox.open_count == 0
    return client.raw


def test_the_stream_of_a_kept_answer_is_equal_to_that_of_the_log_whatever_its_length(
    url: str,
) -> None:
    async def test(bus: Bus) -> None:
        request = new_request_id()
        for raw in RAW:
            await bus.store(str(ReplySubject("s", "t", request)), raw)
        await keep(bus, tenant="t", request=request, frames=RAW)
        from_log = await read(bus, request)
        await bus.purge("REPLIES", f"replies.*.*.{request}")
        assert await read(bus, request) == from_log
        assert from_log.count(b"\nid: ") == LONG
        assert from_log.endswith(b"data: [DONE]\n\n")

    with_bus(url, test)


def test_a_kept_answer_has_no_deadline(url: str) -> None:
    async def test(bus: Bus) -> None:
        request = new_request_id(now_s=time.time() - 20 * 3600)
        await keep(bus, tenant="t", request=request, frames=RAW)
        reply = await attach(bus, Mailbox(bus, "s"), tenant="t", request=request)
        reply.tick(now_s=time.monotonic(), wall_s=time.time())
        assert reply.refusal is None

    with_bus(url, test)


@pytest.mark.parametrize(("age_s", "kind"), [(0, NotFound), (3600, Gone)])
def test_what_is_nowhere_is_404_or_410_and_leaves_nothing_open(
    url: str, age_s: float, kind: Any
) -> None:
    async def test(bus: Bus) -> None:
        mailbox = Mailbox(bus, "s")
        request = new_request_id(now_s=time.time() - age_s)
        await keep(bus, tenant="another", request=request, frames=RAW)
        with pytest.raises(kind):
            await attach(bus, mailbox, tenant="t", request=request)
        assert mailbox.open_count == 0

    with_bus(url, test)


def test_an_end_that_was_stored_just_after_the_log_was_read_is_looked_for_in_a_moment(
    url: str,
) -> None:
    """It was looked for with the next quiet spell only: the client waited for 15 s."""

    async def test(bus: Bus) -> None:
        unheard = Mailbox(bus, "s")  # which is not started: the end was told before it listened
        reply = unheard.open(tenant="t", request=new_request_id(), deadline_s=time.time() + 60)
        await bus.store(reply.log_subject, RAW[0])
        await reply.load()
        read_s = time.monotonic()
        reply.came_late(now_s=read_s)
        await bus.store(reply.log_subject, encode_frame(END))
        reply.tick(now_s=read_s + 2 * LATE_READ_S, wall_s=time.time())
        async with asyncio.timeout(15):
            [end] = await reply.next()
        assert isinstance(end, Complete)

    with_bus(url, test)


def test_an_end_that_was_dropped_with_the_buffer_and_stored_late_is_looked_for_in_a_moment(
    url: str,
) -> None:
    async def test(bus: Bus) -> None:
        unheard = Mailbox(bus, "s")
        reply = unheard.open(
            tenant="t",
            request=new_request_id(),
            deadline_s=time.time() + 60,
            buffer_bytes_max=1,
        )
        for raw in RAW[:3]:
            reply.frame(raw)
            await bus.store(reply.log_subject, raw)
        reply.frame(RAW[-1])  # behind by now: dropped
        for _ in range(2):
            assert len(await reply.next()) == 100
        for raw in RAW[3:]:
            await bus.store(reply.log_subject, raw)
        now_s = time.monotonic()
        for late_s in (0, 2 * LATE_READ_S):
            reply.tick(now_s=now_s + late_s, wall_s=time.time())
        async with asyncio.timeout(15):
            assert len(await reply.next()) == 100

    with_bus(url, test)
