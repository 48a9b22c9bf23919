"""A request is cancelled when its last reader leaves: on one streamer, and on several."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace import topology
from headrace.bus import Bus, BusSettings, Message, connection
from schemas.subjects import (
    RequestSubject,
    cancel_signal,
    new_request_id,
    readers_of,
    streamer_reads,
)
from schemas.wire import (
    Envelope,
    Piece,
    Sampling,
    Shape,
    Started,
    Tokens,
    encode_envelope,
    encode_frame,
)
from streamer import mailbox, readers
from streamer.attach import attach
from streamer.buffer import OpenReply
from streamer.mailbox import Mailbox
from tests.servers import NatsServer
from tests.waiting import until
from workers import recovery
from workers.course import Shown
from workers.recovery import ask_shown

SHAPE = Shape("chat", "m", 5, False, 1, False)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = NatsServer(tmp_path_factory.mktemp("readers"))
    server.start()
    yield server.url
    server.stop()


class Readers:
    """A queued request whose client is at streamer `here`; more readers may come anywhere."""

    def __init__(self, bus: Bus, here: Mailbox, there: Mailbox) -> None:
        self.bus = bus
        self.here = here
        self.there = there
        self.request = new_request_id()
        self.cancelled = 0
        self.first = here.open(tenant="t", request=self.request, deadline_s=4e9)

    @property
    def envelope(self) -> Envelope:
        return Envelope(
            request=self.request,
            tenant="t",
            model="m",
            reply=self.first.log_subject,
            prompt=b"",
            sampling=Sampling(max_tokens=1),
            shape=SHAPE,
            deadline_s=4e9,
        )

    async def start(self, *, begun: bool) -> None:
        async def note(message: Any) -> None:
            self.cancelled += 1

        await self.bus.subscribe(cancel_signal("t", self.request), note)
        subject = RequestSubject("online", "m", 1, "t", self.request)
        await self.bus.store(str(subject), encode_envelope(self.envelope))
        if begun:
            frame = encode_frame(Started(0, "w", 0, SHAPE))
            await self.bus.store(self.first.log_subject, frame)

    async def more(self, mailbox: Mailbox) -> OpenReply:
        return await attach(self.bus, mailbox, tenant="t", request=self.request)

    async def leaves(self, mailbox: Mailbox, reply: OpenReply) -> None:
        reply.leave()
        await mailbox.finish(reply)
        # The signal, if any, has come before what is asked after it.
        await self.bus.request("$JS.API.INFO", b"", timeout_s=5)


@asynccontextmanager
async def two_streamers(url: str) -> AsyncIterator[Readers]:
    async with (
        connection(BusSettings(url), name="here", timeout_s=10) as one,
        connection(BusSettings(url), name="there", timeout_s=10) as two,
    ):
        await topology.apply(one)
        here, there = Mailbox(one, f"here-{new_request_id()}"), Mailbox(two, "there")
        await here.start()
        await there.start()
        yield Readers(one, here, there)


def play(url: str, test: Callable[[Readers], Awaitable[None]]) -> None:
    async def run() -> None:
        async with two_streamers(url) as readers, asyncio.timeout(60):
            await test(readers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "ANSWER_S", 20.0)  # a no comes at once
        asyncio.run(run())


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_further_readers_leaving_leaves_the_first_ones_request_alone(
    url: str, elsewhere: bool, begun: bool
) -> None:
    async def test(readers: Readers) -> None:
        await readers.start(begun=begun)
        mailbox = readers.there if elsewhere else readers.here
        await readers.leaves(mailbox, await readers.more(mailbox))
        assert readers.cancelled == 0
        await readers.leaves(readers.here, readers.first)
        await until(lambda: readers.cancelled == 1)

    play(url, test)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_the_first_readers_leaving_leaves_the_request_to_the_others(
    url: str, elsewhere: bool
) -> None:
    async def test(readers: Readers) -> None:
        await readers.start(begun=True)
        mailbox = readers.there if elsewhere else readers.here
        second, third = await readers.more(mailbox), await readers.more(readers.there)
        await readers.leaves(readers.here, readers.first)
        await readers.leaves(mailbox, second)
        assert readers.cancelled == 0
        await readers.leaves(readers.there, third)
        await until(lambda: readers.cancelled == 1)

    play(url, test)


def test_a_worker_hears_what_a_reader_elsewhere_was_shown(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streamer that the request came through is gone; the log may have lost what it shows."""
    monkeypatch.setattr(recovery, "SHOWN_TIMEOUT_S", 60.0)

    async def test(readers: Readers) -> None:
        await readers.start(begun=False)
        log = readers.first.log_subject
        pieces = tuple(Piece(0, f"{seq}.", (seq,)) for seq in range(5))
        attempt = (await readers.bus.store(log, encode_frame(Started(0, "w", 0, SHAPE)))).seq
        second = await readers.more(readers.there)
        readers.here.close(readers.first)
        await readers.bus.publish(log, encode_frame(Tokens(attempt, 0, pieces)))
        await until(lambda: second.reply.next_seq == 5)
        assert await ask_shown(readers.bus, readers.envelope, have=3) == Shown(5, pieces[3:])
        await readers.leaves(readers.there, second)
        assert await ask_shown(readers.bus, readers.envelope, have=3) is None

    play(url, test)


@pytest.mark.slow
def test_all_leaving_at_once_cancels(url: str) -> None:
    async def test(readers: Readers) -> None:
        await readers.start(begun=True)
        second, third = await readers.more(readers.here), await readers.more(readers.there)
        await asyncio.gather(
            readers.leaves(readers.here, readers.first),
            readers.leaves(readers.here, second),
            readers.leaves(readers.there, third),
        )
        await until(lambda: readers.cancelled >= 1)

    play(url, test)


def test_a_reader_that_is_on_its_way_to_its_streamer_counts(url: str) -> None:
    async def test(readers: Readers) -> None:
        await readers.start(begun=True)
        readers.here.close(readers.first)
        readers.here.awaited = {readers.request}.__contains__
        await readers.leaves(readers.there, await readers.more(readers.there))
        assert readers.cancelled == 0
        readers.here.awaited = lambda request: False
        await readers.leaves(readers.there, await readers.more(readers.there))
        await until(lambda: readers.cancelled == 1)

    play(url, test)


@pytest.mark.slow
def test_a_client_that_may_come_back_is_waited_for_and_found_when_it_has(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "LINGER_S", 8.0)

    async def test(readers: Readers) -> None:
        await readers.start(begun=True)
        readers.first.lingers = True
        leaving = asyncio.create_task(readers.leaves(readers.here, readers.first))
        await until(lambda: readers.here.open_count == 0)
        back = await readers.more(readers.there)
        back.lingers = True
        await leaving
        assert readers.cancelled == 0
        await readers.leaves(readers.there, back)
        await until(lambda: readers.cancelled == 1)

    play(url, test)


def test_a_reader_whose_streamer_stalls_for_a_moment_is_here(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = new_request_id()
    stall_s = readers.ANSWER_S / 4
    assert stall_s >= 0.5
    monkeypatch.setattr(readers, "ANSWER_S", 60.0)  # the machine may add a stall of its own

    async def scenario() -> tuple[bool, bool]:
        async with connection(BusSettings(url), name="test", timeout_s=10) as bus:

            async def late(message: Message) -> None:
                await asyncio.sleep(stall_s)
                await bus.publish(message.reply, readers.HERE)

            await bus.subscribe(readers_of(tenant="t", request=request), late)
            await bus.subscribe(streamer_reads("s"), late)
            return (
                await readers.is_attached(bus, tenant="t", request=request),
                await readers.is_read_at(bus, "s", request=request),
            )

    assert asyncio.run(scenario()) == (True, True)
