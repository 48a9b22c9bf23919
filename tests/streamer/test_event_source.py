"""A browser's EventSource at `/v1/streams/{id}`, as its requests look: 204 once it has seen all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvloop
from starlette.applications import Starlette

from headrace import topology
from headrace.bus import Bus, BusSettings, connection
from headrace.http import serve
from schemas.admit import Caller
from schemas.subjects import ReplySubject, new_request_id
from schemas.wire import (
    Failed,
    Finished,
    Frame,
    Piece,
    Shape,
    Started,
    Tokens,
    Usage,
    encode_frame,
)
from streamer.app import client_routes
from streamer.buffer import PAGE_BYTES_MAX
from streamer.mailbox import Mailbox
from tests.servers import NatsServer
from tests.sse import Reader

PIECES = 300
TEXT = "x" * 1000
RETRY_MS = 1000


class Anyone:
    """An `Admission` of one tenant."""

    async def identify(
        self, headers: Sequence[tuple[bytes, bytes]], *, peer: str | None = None
    ) -> Caller | None:
        return Caller("t")


class Made:
    """A reply in the log, made as far as a test says."""

    def __init__(self, bus: Bus, http: httpx.AsyncClient) -> None:
        self._bus = bus
        self._http = http
        self._request = new_request_id()
        self._subject = str(ReplySubject("gone", "t", self._request))
        self._attempt = 0

    async def make(self, pieces: int) -> None:
        """Store the beginning."""
        shape = Shape("completion", "m", 5, False, 1, False)
        self._attempt = (await self._store(Started(0, "w", 0, shape))).seq
        for seq in range(pieces):
            await self._store(Tokens(self._attempt, seq, (Piece(0, TEXT, (seq,)),)))

    async def finish(self, seq: int) -> None:
        """Store the end."""
        await self._store(Finished(self._attempt, seq, (), ("stop",), Usage(1, seq, 0), {}))

    async def fail(self, seq: int) -> None:
        """Store an end that is none of the model's."""
        await self._store(
            Failed(self._attempt, seq, (), "engine_error", "It broke.", Usage(1, seq, 0))
        )

    async def _store(self, frame: Frame) -> Any:
        return await self._bus.store(self._subject, encode_frame(frame))

    @asynccontextmanager
    async def open(self, last: int) -> AsyncIterator[httpx.Response]:
        """Ask as an EventSource that has seen the event of this id."""
        headers = {"accept": "text/event-stream", "last-event-id": str(last)}
        url = f"/v1/streams/{self._request}"
        async with self._http.stream("GET", url, headers=headers) as answer:
            yield answer

    async def read(self, last: int) -> tuple[int, Reader, list[str | None]]:
        """Read to the end; return the status, the reader, and the events' ids."""
        async with self.open(last) as answer:
            reader = Reader()
            events = reader.feed(await answer.aread())
            return answer.status_code, reader, [event.id for event in events]


def play(server: NatsServer, test: Callable[[Made], Awaitable[None]]) -> None:
    async def run() -> None:
        settings = BusSettings(server.url)
        async with asyncio.timeout(60), connection(settings, name="test", timeout_s=10) as bus:
            await topology.apply(bus)
            mailbox = Mailbox(bus, f"s-{new_request_id()[-8:]}")
            await mailbox.start()
            ticking = asyncio.create_task(mailbox.tick_forever())
            anyone: Any = Anyone()
            app = Starlette(routes=client_routes(bus, mailbox, anyone))
            serving = await serve(app, host="127.0.0.1", port=0)
            try:
                async with httpx.AsyncClient(base_url=serving.url, timeout=30) as http:
                    await test(Made(bus, http))
                assert mailbox.open_count == 0
            finally:
                ticking.cancel()
                await serving.close()

    uvloop.run(run())


def test_whoever_has_seen_the_end_of_a_stream_of_many_pages_gets_204(own_nats: NatsServer) -> None:
    assert PIECES * len(TEXT) > 3 * PAGE_BYTES_MAX

    async def test(made: Made) -> None:
        await made.make(PIECES)
        await made.finish(PIECES)
        status, reader, ids = await made.read(PIECES - 2)
        assert (status, reader.retry_ms) == (200, RETRY_MS)
        assert ids == [str(PIECES - 1), str(PIECES), None]
        status, reader, ids = await made.read(PIECES)
        assert (status, reader.retry_ms, ids) == (204, None, [])

    play(own_nats, test)


def test_whoever_has_seen_all_there_is_of_a_running_one_waits_for_more(
    own_nats: NatsServer,
) -> None:
    async def test(made: Made) -> None:
        await made.make(5)
        async with made.open(4) as answer:
            parts = answer.aiter_raw()
            assert answer.status_code == 200
            assert await anext(parts) == b"retry: 1000\n"
            await made.finish(5)
            rest = b"".join([part async for part in parts])
        assert [event.id for event in Reader().feed(rest)] == ["5", None]
        assert (await made.read(5))[0] == 204

    play(own_nats, test)


@pytest.mark.parametrize("last", [2, 4])
def test_an_error_at_the_end_is_told_though_every_token_was_seen(
    own_nats: NatsServer, last: int
) -> None:
    async def test(made: Made) -> None:
        await made.make(5)
        await made.fail(5)
        status, reader, ids = await made.read(last)
        assert (status, reader.retry_ms) == (200, RETRY_MS)
        assert ids == [*(str(seq) for seq in range(last + 1, 5)), None]

    play(own_nats, test)
