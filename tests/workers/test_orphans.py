"""Requests whose readers have vanished are cancelled after their patience, and no others."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from headrace import topology
from headrace.bus import Bus, Message
from schemas import subjects
from schemas.subjects import ReplySubject, new_request_id
from schemas.wire import Envelope, Sampling, Shape
from streamer.mailbox import Mailbox
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until
from workers import orphans
from workers.orphans import Absences, Orphans

PATIENCE_S = 1.2
"""More than a moment in which a busy machine lets nobody answer."""
SHAPE = Shape("chat", "m", 5, False, 1, False)


def due(absences: Absences, *, now_s: float) -> list[str]:
    return [name for name in absences.unread if absences.is_due(name, now_s=now_s)]


def test_a_request_is_due_once_its_patience_is_over_and_not_before() -> None:
    absences = Absences(30)
    absences.heard("s", ["a", "b"], ["a"], now_s=100)
    assert due(absences, now_s=129.9) == []
    assert due(absences, now_s=130) == ["a"]


def test_a_reader_that_comes_in_time_ends_the_wait() -> None:
    absences = Absences(30)
    absences.heard("s", ["a"], ["a"], now_s=100)
    absences.heard("s", ["a"], [], now_s=125)
    absences.heard("s", ["a"], ["a"], now_s=130)
    assert due(absences, now_s=159) == []
    assert due(absences, now_s=160) == ["a"]


def test_a_request_taken_later_has_waited_as_long_as_its_streamer_is_gone() -> None:
    absences = Absences(30)
    absences.absent("s", ["a"], now_s=100)
    absences.forget_all_but([], now_s=120)
    absences.absent("s", ["b"], now_s=140)
    assert due(absences, now_s=140) == ["b"]


def test_a_streamer_that_is_heard_again_was_not_gone() -> None:
    absences = Absences(30)
    absences.absent("s", ["a"], now_s=100)
    absences.heard("s", ["a"], [], now_s=120)
    absences.absent("s", ["a", "b"], now_s=131)
    assert due(absences, now_s=160) == []
    assert due(absences, now_s=161) == ["a", "b"]


def test_a_reader_elsewhere_begins_the_patience_anew() -> None:
    absences = Absences(30)
    absences.absent("s", ["a"], now_s=100)
    absences.patient("a", now_s=130)
    absences.absent("s", ["a"], now_s=135)
    assert due(absences, now_s=159) == []
    assert due(absences, now_s=160) == ["a"]


def test_time_without_the_broker_does_not_count() -> None:
    absences = Absences(30)
    absences.absent("s", ["a"], now_s=100)
    absences.reset()
    absences.absent("s", ["a"], now_s=200)
    assert due(absences, now_s=229) == []
    assert due(absences, now_s=230) == ["a"]


class Scene:
    """A worker's watch over some requests, streamers, and what was cancelled."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.held: list[Envelope] = []
        self.cancelled: list[str] = []

    def hold(self, streamer: str, *, keep: bool = False, request: str = "") -> str:
        """Have the worker hold a request whose reply goes to a streamer; return its id."""
        request = request or new_request_id()
        envelope = Envelope(
            request=request,
            tenant="t",
            model="m",
            reply=str(ReplySubject(streamer, "t", request)),
            prompt=b"",
            sampling=Sampling(max_tokens=1),
            shape=SHAPE._replace(keep=keep),
            deadline_s=time.time() + 60,
        )
        self.held.append(envelope)
        return request

    async def looked(self, times: int) -> None:
        """Wait until a streamer of its own was asked so often: so many looks have passed."""
        name, asked = f"bell-{new_request_id()}", 0

        async def ask(message: Message) -> None:
            nonlocal asked
            asked += 1
            await self.bus.publish(message.reply, b"[]")

        await self.bus.subscribe(subjects.streamer_unread(name), ask)
        self.hold(name)
        await until(lambda: asked >= times)


@asynccontextmanager
async def _watching(bus: Bus) -> AsyncIterator[Scene]:
    await topology.apply(bus)
    scene = Scene(bus)

    async def heard(message: Message) -> None:
        scene.cancelled.append(message.subject.rpartition(".")[2])

    await bus.subscribe(subjects.CANCEL_SIGNALS, heard)
    watch = asyncio.create_task(Orphans(bus, lambda: scene.held, patience_s=PATIENCE_S).watch())
    try:
        yield scene
    finally:
        watch.cancel()


def play(url: str, test: Callable[[Scene], Awaitable[None]]) -> None:
    async def run(bus: Bus) -> None:
        async with _watching(bus) as scene:
            await test(scene)

    with_bus(url, run)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = NatsServer(tmp_path_factory.mktemp("orphans"))
    server.start()
    yield server.url
    server.stop()


@pytest.mark.slow
def test_what_a_dead_streamer_left_is_cancelled_but_not_what_may_run_on_alone(url: str) -> None:
    async def test(scene: Scene) -> None:
        kept = scene.hold("dead", keep=True)
        lost = scene.hold("dead")
        await until(lambda: lost in scene.cancelled)
        assert set(scene.cancelled) == {lost}
        await scene.looked(7)
        assert kept not in scene.cancelled

    play(url, test)


@pytest.mark.slow
def test_what_a_streamer_reads_goes_on_and_what_it_does_not_is_cancelled(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "ANSWER_S", 30.0)

    async def test(scene: Scene) -> None:
        mailbox = Mailbox(scene.bus, "alive")
        await mailbox.start()
        read, unread = scene.hold("alive"), scene.hold("alive")
        reply = mailbox.open(tenant="t", request=read, deadline_s=time.time() + 60)
        await until(lambda: unread in scene.cancelled)
        assert set(scene.cancelled) == {unread}
        await scene.looked(7)
        assert read not in scene.cancelled
        mailbox.close(reply)
        await until(lambda: read in scene.cancelled)

    play(url, test)


@pytest.mark.slow
def test_a_reader_at_another_streamer_keeps_a_dead_ones_request_until_it_leaves(url: str) -> None:
    async def test(scene: Scene) -> None:
        other = Mailbox(scene.bus, "other")
        await other.start()
        resumed, lost = scene.hold("dead"), scene.hold("dead")
        reply = await other.attach(tenant="t", request=resumed)
        await until(lambda: lost in scene.cancelled)
        assert set(scene.cancelled) == {lost}
        await scene.looked(7)
        assert resumed not in scene.cancelled
        await other.detach(reply)
        await until(lambda: resumed in scene.cancelled)

    play(url, test)


@pytest.mark.slow
def test_a_frozen_streamer_counts_as_absent(url: str) -> None:
    async def test(scene: Scene) -> None:
        async def silent(_: Message) -> None:
            return

        await scene.bus.subscribe(subjects.streamer_unread("frozen"), silent)
        lost = scene.hold("frozen")
        await until(lambda: lost in scene.cancelled)
        assert set(scene.cancelled) == {lost}

    play(url, test)
