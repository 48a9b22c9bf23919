"""Several readers of one reply: the request is cancelled when the last of them leaves."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from headrace import topology
from headrace.bus import Bus, Message
from schemas import subjects
from schemas.subjects import ReplySubject, RequestSubject, new_request_id
from schemas.wire import Envelope, Sampling, Shape, encode_envelope
from streamer.buffer import OpenReply
from streamer.mailbox import Mailbox
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until


def _envelope(streamer: str, request: str) -> Envelope:
    return Envelope(
        request=request,
        tenant="t",
        model="m",
        reply=str(ReplySubject(streamer, "t", request)),
        prompt=b"",
        sampling=Sampling(max_tokens=1),
        shape=Shape("completion", "m", 1),
        deadline_s=time.time() + 60,
    )


class Scene:
    """Two streamers, the first of which relays a request; and the cancels that were heard."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.request = new_request_id()
        self.first = Mailbox(bus, f"first-{self.request}")
        self.other = Mailbox(bus, f"other-{self.request}")
        self.cancelled: list[str] = []

    async def start(self) -> OpenReply:
        await self.first.start()
        await self.other.start()

        async def heard(message: Message) -> None:
            self.cancelled.append(message.subject)

        await self.bus.subscribe(subjects.cancel_signal("t", self.request), heard)
        await self.bus.store(
            str(RequestSubject("online", "m", 0, "t", self.request)),
            encode_envelope(_envelope(self.first.streamer, self.request)),
        )
        return self.first.open(tenant="t", request=self.request, deadline_s=time.time() + 60)

    async def resumed(self) -> OpenReply:
        return await self.other.attach(tenant="t", request=self.request)

    async def left(self, mailbox: Mailbox, reply: OpenReply) -> None:
        reply.leave()
        await mailbox.finish(reply)
        await self.bus.api("INFO")  # whatever was to be heard has been


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = NatsServer(tmp_path_factory.mktemp("readers"))
    server.start()
    with_bus(server.url, topology.apply)
    yield server.url
    server.stop()


def play(url: str, test: Callable[[Scene], Awaitable[None]]) -> None:
    async def run(bus: Bus) -> None:
        async with asyncio.timeout(10):
            await test(Scene(bus))

    with_bus(url, run)


def test_the_first_reader_leaves_and_the_one_that_resumed_goes_on(url: str) -> None:
    async def test(scene: Scene) -> None:
        own = await scene.start()
        resumed = await scene.resumed()
        await scene.left(scene.first, own)
        assert scene.cancelled == []
        await scene.left(scene.other, resumed)
        await until(lambda: len(scene.cancelled) == 1)

    play(url, test)


def test_who_resumed_leaves_and_the_first_reader_goes_on(url: str) -> None:
    """The second reader's leaving ended the stream of the first."""

    async def test(scene: Scene) -> None:
        own = await scene.start()
        await scene.left(scene.other, await scene.resumed())
        assert scene.cancelled == []
        await scene.left(scene.first, own)
        await until(lambda: len(scene.cancelled) == 1)

    play(url, test)


def test_of_two_that_resumed_the_last_one_counts(url: str) -> None:
    async def test(scene: Scene) -> None:
        scene.first.close(await scene.start())
        one, two = await scene.resumed(), await scene.resumed()
        await scene.left(scene.other, one)
        assert scene.cancelled == []
        await scene.left(scene.other, two)
        await until(lambda: len(scene.cancelled) == 1)

    play(url, test)
