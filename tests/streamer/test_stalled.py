"""Clients that stop reading, on real sockets: they are cut so that they can resume, and what they
did not read is kept for nobody."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

import httpx
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from headrace import connection, topology
from headrace.answers import EXCEPTION_HANDLERS
from headrace.bus import Bus, BusSettings
from headrace.bus import connection as broker_connection
from headrace.http import Serving, serve
from schemas.admit import Caller
from schemas.subjects import new_request_id
from schemas.wire import Finished, Piece, Shape, Started, Tokens, Usage, encode_frame
from streamer import buffer, relay
from streamer.app import client_routes
from streamer.buffer import OpenReply
from streamer.mailbox import Mailbox
from streamer.relay import Relay
from tests.servers import NatsServer
from tests.sse import Event, Reader
from tests.waiting import until

STALLED_S = 0.5
READS_S = 6.0
"""How long one that reads may be kept from it, by a busy machine, without being cut."""
PIECES = 600
TEXT = "x" * 10_000
STARTED = Started(0, "w", 0, Shape("completion", "m", 5, False, 1, False))


class Anyone:
    """An `Admission` of one tenant."""

    async def identify(
        self, headers: Sequence[tuple[bytes, bytes]], *, peer: str | None = None
    ) -> Caller | None:
        return Caller("t")


class Client:
    """A client that reads when told to, and lets little wait in its own machine."""

    def __init__(self, port: int, path: str) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def read(self, size: int = 65536) -> bytes:
        """Return what comes next; nothing at the end."""
        return await asyncio.get_running_loop().sock_recv(self.socket, size)

    async def read_all(self) -> bytes:
        """Read to the end of the connection and return the answer's body."""
        raw = b""
        while part := await self.read():
            raw += part
        _, _, rest = raw.partition(b"\r\n\r\n")
        body = b""
        while rest:  # chunks: RFC 9112, section 7.1
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return body


class Place:
    """A streamer on a port with one long reply, all of which has been made."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.request = new_request_id()
        self.mailbox = Mailbox(bus, f"s-{self.request}")
        self.reply: OpenReply
        self.serving: Serving

    async def start(self) -> None:
        await self.mailbox.start()
        self.reply = self.mailbox.open(
            tenant="t", request=self.request, deadline_s=time.time() + 600
        )
        relayed = Relay(self.mailbox, self.reply, stream=True, headers={})
        anyone: Any = Anyone()
        rest = Starlette(
            routes=[
                Route("/large", lambda _: Response(b"x" * 20_000_000)),
                *client_routes(self.bus, self.mailbox, anyone),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await (relayed if scope["path"] == "/reply" else rest)(scope, receive, send)

        self.serving = await serve(app, host="127.0.0.1", port=0)

    async def make(self, pieces: int = PIECES) -> None:
        """Have the whole reply made, faster than anybody reads it."""
        claim = await self.bus.store(self.reply.log_subject, encode_frame(STARTED))
        for seq in range(pieces):
            frame = Tokens(claim.seq, seq, (Piece(0, TEXT, (seq,)),))
            await self.bus.publish(self.reply.log_subject, encode_frame(frame))
        end = Finished(claim.seq, pieces, (), ("stop",), Usage(1, pieces, 0), {})
        await self.bus.store(self.reply.log_subject, encode_frame(end))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = NatsServer(tmp_path_factory.mktemp("stalled"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def play(url: str, monkeypatch: pytest.MonkeyPatch) -> "Play":
    def run(
        test: Callable[[Place], Awaitable[None]],
        *,
        stalled_s: float = STALLED_S,
        cut_s: float = STALLED_S,
    ) -> None:
        monkeypatch.setattr(buffer, "STALLED_S_MAX", stalled_s)
        monkeypatch.setattr(relay, "CUT_S", cut_s)
        monkeypatch.setattr(connection, "STALLED_S", stalled_s)

        async def scenario() -> None:
            async with (
                asyncio.timeout(60),
                broker_connection(BusSettings(url), name="test", timeout_s=10) as bus,
            ):
                await topology.apply(bus)
                place = Place(bus)
                await place.start()
                ticking = asyncio.create_task(place.mailbox.tick_forever())
                try:
                    await test(place)
                finally:
                    ticking.cancel()
                    await place.serving.close()

        uvloop.run(scenario())

    return run


def ids_of(events: list[Event]) -> list[int]:
    return [int(event.id) for event in events if event.id is not None]


class Play(Protocol):
    """Runs a test; a client that reads nothing for `stalled_s` is cut, and may begin to read what
    it was sent last within `cut_s`."""

    def __call__(
        self,
        test: Callable[[Place], Awaitable[None]],
        *,
        stalled_s: float = STALLED_S,
        cut_s: float = STALLED_S,
    ) -> None: ...


def test_who_reads_nothing_any_more_is_cut_and_leaves_nothing(play: Play) -> None:
    """Its connection stayed open with what it had not read, for ever."""

    async def test(place: Place) -> None:
        with Client(place.serving.port, "/reply"):
            await until(lambda: place.serving.connections == 1)
            await place.make()
            await until(lambda: not place.mailbox.open_count)
            await until(lambda: not place.serving.connections)

    play(test)


def test_who_reads_again_is_told_and_resumes_without_a_hole(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(place: Place) -> None:
        reader = Reader()
        with Client(place.serving.port, "/reply") as client:
            await until(lambda: place.serving.connections == 1)
            await place.make()
            await until(lambda: not place.mailbox.open_count)
            first = reader.feed(await client.read_all())
        assert reader.at_end
        assert first[-1].json["error"]["code"] == "stream_interrupted"
        # From here on it reads: who keeps it from that is the machine.
        monkeypatch.setattr(buffer, "STALLED_S_MAX", 60.0)
        monkeypatch.setattr(connection, "STALLED_S", 60.0)
        async with httpx.AsyncClient(base_url=place.serving.url, timeout=60) as http:
            last = {"last-event-id": first[-2].id or ""}
            answer = await http.get(f"/v1/streams/{place.request}", headers=last)
        rest = Reader().feed(answer.content)
        assert ids_of(first) + ids_of(rest) == list(range(PIECES + 1))
        assert rest[-1].data == "[DONE]"

    play(test, cut_s=25.0)


@pytest.mark.slow
def test_who_reads_slowly_but_reads_gets_everything(play: Play) -> None:
    async def test(place: Place) -> None:
        body = b""
        with Client(place.serving.port, "/reply") as client:
            await until(lambda: place.serving.connections == 1)
            await place.make(180)
            while b"[DONE]" not in body[-100:]:
                body += await client.read(4096)
                await asyncio.sleep(0.02)  # a line of 200 kB/s: for nine seconds
        assert place.reply.refusal is None
        numbers = [int(line[4:]) for line in body.split(b"\n") if line.startswith(b"id: ")]
        assert numbers == list(range(181))

    play(test, stalled_s=READS_S)


def test_a_whole_answer_that_nobody_reads_is_cut_too(play: Play) -> None:
    async def test(place: Place) -> None:
        place.mailbox.close(place.reply)
        with Client(place.serving.port, "/large"):
            await until(lambda: place.serving.connections == 1)
            await until(lambda: not place.serving.connections)

    play(test)


@pytest.mark.slow
def test_a_connection_that_is_read_is_kept_for_the_next_request(play: Play) -> None:
    async def test(place: Place) -> None:
        place.mailbox.close(place.reply)
        async with httpx.AsyncClient(base_url=place.serving.url, timeout=60) as http:
            for _ in range(2):
                assert len((await http.get("/large")).content) == 20_000_000
                assert place.serving.connections == 1
                await asyncio.sleep(1.2 * READS_S)  # longer than a stall may last

    play(test, stalled_s=READS_S)
