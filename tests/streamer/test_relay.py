"""One reply carried to one client: holes, slow readers, silence, deadlines; over a real broker."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from headrace import topology
from headrace.bus import Bus
from schemas.errors import StreamInterrupted
from schemas.subjects import new_request_id
from schemas.wire import Finished, Frame, Piece, Shape, Started, Tokens, Usage, encode_frame
from streamer.buffer import OpenReply
from streamer.mailbox import Mailbox
from streamer.relay import Relay
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.sse import Event, events_of
from tests.waiting import until

STARTED = Started(0, "w", 0, Shape("completion", "m", 5, False, 1, False))


def tokens(first: int, end: int, *, text: str = "t") -> Tokens:
    return Tokens(1, first, tuple(Piece(0, f"{text}{seq} ", (seq,)) for seq in range(first, end)))


def finished(seq: int = 3) -> Finished:
    return Finished(1, seq, (), ("stop",), Usage(1, seq, 0), {})


class Client:
    """An HTTP client at the other end of ASGI; it may stop reading, or leave."""

    def __init__(self) -> None:
        self.raw = b""
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.raw += message.get("body", b"")

    @property
    def events(self) -> list[Event]:
        return events_of(self.raw)

    @property
    def text(self) -> str:
        chunks = [event.json for event in self.events if event.data != "[DONE]"]
        return "".join(part["text"] for c in chunks if "choices" in c for part in c["choices"])


class Path:
    """A mailbox with one open reply, its relay and its client."""

    def __init__(
        self,
        bus: Bus,
        *,
        stream: bool = True,
        serves: Callable[[str], bool] = lambda model: True,
    ) -> None:
        self.bus = bus
        self.request = new_request_id()
        self.mailbox = Mailbox(bus, f"s-{self.request[-8:]}", serves=serves)
        self.reply: OpenReply = self.mailbox.open(
            tenant="t", request=self.request, deadline_s=time.time() + 60, model="m"
        )
        self.client = Client()
        self.attempt = 1
        self.relay = Relay(self.mailbox, self.reply, stream=stream, headers={})

    def hear(self, *frames: Frame) -> None:
        """Have frames come live."""
        for frame in frames:
            self.reply.frame(self._numbered(frame))

    async def claim(self) -> None:
        """Have `started` in REPLIES; its sequence there numbers the attempt."""
        claim = await self.bus.store(self.reply.log_subject, encode_frame(STARTED))
        self.attempt = claim.seq

    async def log(self, *frames: Frame) -> None:
        """Have frames in REPLIES."""
        subject = self.reply.log_subject
        answers = [await self.bus.store_soon(subject, self._numbered(f)) for f in frames]
        await asyncio.gather(*answers)

    def _numbered(self, frame: Frame) -> bytes:
        if not isinstance(frame, Started):
            frame = frame._replace(attempt=self.attempt)
        return encode_frame(frame)

    async def run(self) -> None:
        async with asyncio.timeout(30):
            await self.relay({}, self.client.receive, self.client.send)


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = NatsServer(tmp_path_factory.mktemp("replies"))
    server.start()
    with_bus(server.url, topology.apply)
    yield server.url
    server.stop()


def relayed(url: str, test: Callable[[Path], Awaitable[None]]) -> None:
    async def run(bus: Bus) -> None:
        await test(Path(bus))

    with_bus(url, run)


def test_a_refusal_that_meets_a_token_is_still_told(replies: str) -> None:
    async def test(path: Path) -> None:
        path.hear(STARTED, tokens(0, 1))
        path.reply.refuse(StreamInterrupted("This node is stopping."))
        await path.run()
        token, error = path.client.events
        assert token.id == "0"
        assert error.id is None
        assert error.json["error"]["code"] == "stream_interrupted"

    relayed(replies, test)


def test_a_refusal_after_the_end_changes_nothing(replies: str) -> None:
    async def test(path: Path) -> None:
        path.hear(STARTED, tokens(0, 3), finished())
        path.reply.refuse(StreamInterrupted("This node is stopping."))
        await path.run()
        assert path.client.text == "t0 t1 t2 "
        assert path.client.events[-1].data == "[DONE]"

    relayed(replies, test)


def test_a_hole_is_filled_from_the_log(replies: str) -> None:
    async def test(path: Path) -> None:
        await path.claim()
        await path.log(tokens(0, 1), tokens(1, 2), tokens(2, 3), finished())
        path.hear(STARTED, tokens(0, 1), tokens(2, 3), finished())
        running = asyncio.create_task(path.run())
        await until(lambda: b"t0 " in path.client.raw)
        now_s = time.monotonic()
        for later_s in (0, 0.3):
            path.reply.tick(now_s=now_s + later_s, wall_s=time.time())
        await running
        assert path.client.text == "t0 t1 t2 "

    relayed(replies, test)


def test_a_reader_that_catches_up_for_long_is_not_refused_for_what_came_early(
    replies: str,
) -> None:
    async def test(path: Path) -> None:
        path.hear(STARTED, tokens(0, 1), tokens(5, 6))
        running = asyncio.create_task(path.run())
        await until(lambda: b"t0 " in path.client.raw)
        now_s = time.monotonic()
        for seq in range(1, 5):
            path.reply.tick(now_s=now_s + 8 * seq, wall_s=time.time())
            path.hear(tokens(seq, seq + 1))
            await until(lambda: path.reply.tokens > seq or running.done())  # noqa: B023
        path.hear(finished(6))
        await running
        assert path.client.text == "t0 t1 t2 t3 t4 t5 "
        assert path.client.events[-1].data == "[DONE]"

    relayed(replies, test)


def test_a_hole_that_the_log_has_too_ends_in_an_error_event(replies: str) -> None:
    async def test(path: Path) -> None:
        path.hear(STARTED, tokens(0, 1), tokens(2, 3), finished())
        running = asyncio.create_task(path.run())
        await until(lambda: b"t0 " in path.client.raw)
        now_s = time.monotonic()
        for later_s in (0, 5, 11):
            path.reply.tick(now_s=now_s + later_s, wall_s=time.time())
        await running
        assert path.client.text == "t0 "
        assert path.client.events[-1].json["error"]["code"] == "stream_interrupted"

    relayed(replies, test)


def test_a_reply_whose_every_frame_was_missed_is_read_after_a_quiet_spell(replies: str) -> None:
    async def test(path: Path) -> None:
        await path.claim()
        await path.log(tokens(0, 3), finished())
        running = asyncio.create_task(path.run())
        path.reply.tick(now_s=time.monotonic() + 16, wall_s=time.time())
        await running
        assert path.client.text == "t0 t1 t2 "
        assert path.client.events[-1].data == "[DONE]"

    relayed(replies, test)


def test_a_reply_missed_while_the_connection_was_broken_is_read(replies: str) -> None:
    async def test(path: Path) -> None:
        await path.claim()
        await path.log(tokens(0, 3), finished())
        running = asyncio.create_task(path.run())
        path.reply.look_at_log()
        await running
        assert path.client.text == "t0 t1 t2 "

    relayed(replies, test)


def test_a_reader_that_falls_behind_gets_everything_once_in_order(replies: str) -> None:
    async def test(path: Path) -> None:
        frames = [tokens(seq, seq + 1, text="x" * 500 + "-") for seq in range(3000)]
        await path.mailbox.start()
        running = asyncio.create_task(path.run())
        await path.claim()
        path.client.reads.clear()
        await path.log(*frames, finished(3000))
        path.client.reads.set()
        now_s = time.monotonic()
        for later_s in (0, 0.3, 16, 32):
            if not running.done():
                await asyncio.sleep(0.05)
                path.reply.tick(now_s=now_s + later_s, wall_s=time.time())
        await running
        ids = [int(event.id) for event in path.client.events if event.id is not None]
        assert ids == list(range(3001))

    relayed(replies, test)


def test_a_quiet_stream_gets_a_comment(replies: str) -> None:
    async def test(path: Path) -> None:
        running = asyncio.create_task(path.run())
        path.reply.tick(now_s=time.monotonic() + 14.5, wall_s=time.time())
        await until(lambda: path.client.raw == b": waiting\n")
        path.hear(STARTED, tokens(0, 3), finished())
        await running

    relayed(replies, test)


def test_tokens_whose_text_is_held_back_are_quiet_too(replies: str) -> None:
    async def test(path: Path) -> None:
        path.hear(STARTED, tokens(0, 1))
        running = asyncio.create_task(path.run())
        await until(lambda: len(path.client.events) == 1)
        now_s = time.monotonic()
        path.reply.tick(now_s=now_s, wall_s=time.time())
        path.hear(Tokens(1, 1, (Piece(0, "", (1,)),)))
        path.reply.tick(now_s=now_s + 14.5, wall_s=time.time())
        await until(lambda: path.client.raw.endswith(b": waiting\n"))
        path.hear(tokens(2, 3), finished())
        await running
        assert path.client.text == "t0 t2 "

    relayed(replies, test)


def test_the_deadline_ends_a_reply_with_an_error_event(replies: str) -> None:
    async def test(path: Path) -> None:
        path.hear(STARTED, tokens(0, 1))
        running = asyncio.create_task(path.run())
        path.reply.tick(now_s=time.monotonic(), wall_s=path.reply.deadline_s + 1.1)
        await running
        assert path.client.events[-1].json["error"]["code"] == "deadline_exceeded"

    relayed(replies, test)


@pytest.mark.parametrize(("serves", "code"), [(True, "deadline_exceeded"), (False, "no_workers")])
@pytest.mark.parametrize("stream", [True, False])
def test_what_nobody_began_ends_at_its_deadline_and_says_whether_anybody_could_have(
    replies: str, serves: bool, code: str, stream: bool
) -> None:
    async def test(bus: Bus) -> None:
        path = Path(bus, stream=stream, serves=lambda model: serves)
        running = asyncio.create_task(path.run())
        path.reply.tick(now_s=time.monotonic(), wall_s=path.reply.deadline_s - 0.01)
        assert path.reply.refusal is None
        path.reply.tick(now_s=time.monotonic(), wall_s=path.reply.deadline_s + 0.01)
        await running
        assert f'"code":"{code}"' in path.client.raw.decode()

    with_bus(replies, test)


def test_a_client_that_leaves_cancels_its_request_in_queue_and_workers(replies: str) -> None:
    async def test(path: Path) -> None:
        signals: list[str] = []

        async def heard(message: Any) -> None:
            signals.append(message.subject)

        await path.bus.subscribe("cancels.>", heard)
        await path.bus.store(f"requests.online.m.1.t.{path.request}", b"")
        running = asyncio.create_task(path.run())
        path.client.left.set()
        await running
        await until(lambda: signals == [f"cancels.t.{path.request}"])
        assert (await path.bus.api("STREAM.INFO.REQUESTS"))["state"]["messages"] == 0
        assert path.mailbox.open_count == 0

    relayed(replies, test)


def test_a_client_that_does_not_read_for_a_minute_is_cut_and_its_request_may_be_resumed(
    replies: str,
) -> None:
    async def test(path: Path) -> None:
        await path.bus.store(f"requests.online.m.1.t.{path.request}", b"")
        path.hear(STARTED)
        running = asyncio.create_task(path.run())
        await asyncio.sleep(0)
        path.client.reads.clear()
        path.hear(tokens(0, 1))
        await until(lambda: path.reply.tokens == 1)
        now_s = time.monotonic()
        for later_s in (0, 59, 61):
            path.reply.tick(now_s=now_s + later_s, wall_s=time.time())
        await running
        assert path.mailbox.open_count == 0
        assert isinstance(path.reply.refusal, StreamInterrupted)
        assert await path.bus.purge("REQUESTS", f"requests.*.*.*.t.{path.request}") == 1

    relayed(replies, test)


class Line:
    """A connection, as far as a tick looks at it."""

    unsent_bytes = 0


class Cut(Line):
    """One that takes what is left once its client is cut."""

    def __init__(self, client: Client) -> None:
        self.take_all = client.reads.set

    def close(self, *, still_s: float) -> None:
        """It ends."""


def test_a_responses_reader_that_is_cut_is_told_in_its_own_events(replies: str) -> None:
    async def test(path: Path) -> None:
        running = asyncio.create_task(path.run())
        path.hear(STARTED._replace(shape=STARTED.shape._replace(endpoint="response")))
        await asyncio.sleep(0)
        line: Any = Cut(path.client)
        path.reply.connection = line
        path.client.reads.clear()
        path.hear(tokens(0, 1))
        await until(lambda: path.reply.tokens == 1)
        running.cancel()
        await running
        last = path.client.events[-1]
        assert (last.name, last.json["type"]) == ("error", "error")
        assert last.json["sequence_number"] == 5  # after the beginning, and its text's three
        assert last.json["error"]["code"] == last.json["code"] == "stream_interrupted"

    relayed(replies, test)


def test_a_client_that_takes_a_little_each_minute_is_not_cut(replies: str) -> None:
    """A write that took long was a stall, however much of it was taken meanwhile."""

    async def test(path: Path) -> None:
        running = asyncio.create_task(path.run())
        path.hear(STARTED)
        await asyncio.sleep(0)
        line: Any = Line()
        path.reply.connection = line
        path.client.reads.clear()
        path.hear(tokens(0, 1))
        await until(lambda: path.reply.tokens == 1)
        now_s = time.monotonic()
        for later_s, line.unsent_bytes in ((0, 900), (50, 800), (100, 799), (159, 799)):
            path.reply.tick(now_s=now_s + later_s, wall_s=time.time())
            assert not path.reply.stalled
        path.client.reads.set()
        path.hear(finished(1))
        await running
        assert path.client.events[-1].data == "[DONE]"

    relayed(replies, test)
