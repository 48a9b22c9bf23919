"""A browser's EventSource at `/v1/streams/{id}`, as its requests look: 204 once it has seen all."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import uvloop
from starlette.applications import Starlette

from headrace import topology
from headrace.answers import EXCEPTION_HANDLERS
from headrace.bus import Bus, BusSettings, Message, connection
from headrace.cors import Cors
from headrace.http import Serving, serve
from headrace.resume import stream_route
from headrace.ticket import Tickets
from ingress.redirect import Redirect
from ingress.resume import RestThere
from schemas import subjects
from schemas.admit import Caller
from schemas.model import StreamerEntry
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
from streamer.app import Application
from streamer.buffer import PAGE_BYTES_MAX
from streamer.desk import Desk
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

    def __init__(self, bus: Bus, http: httpx.AsyncClient, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
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

    async def open_again(self, answer: httpx.Response, last: int) -> httpx.Response:
        """Ask where `answer` came from: Chromium keeps the address that it was redirected to."""
        headers = {"accept": "text/event-stream", "last-event-id": str(last)}
        return await self._http.get(answer.url, headers=headers)

    async def plain(self) -> httpx.Response:
        """Ask for the whole, as one that is no EventSource."""
        return await self._http.get(f"/v1/streams/{self._request}")

    async def read(self, last: int) -> tuple[int, Reader, list[str | None]]:
        """Read to the end; return the status, the reader, and the events' ids."""
        async with self.open(last) as answer:
            reader = Reader()
            events = reader.feed(await answer.aread())
            return answer.status_code, reader, [event.id for event in events]


class Streamer:
    """A streamer, and an ingress that sends clients there; both in this process."""

    def __init__(self, bus: Bus) -> None:
        self.name = f"s-{new_request_id()[-8:]}"
        self.mailbox = Mailbox(bus, self.name)
        self._bus = bus
        self._anyone: Any = Anyone()
        self._tickets = Tickets(secrets.token_bytes(32))

    async def serve(self) -> Serving:
        """Serve the streamer, and say that it lives."""
        bus, desk = self._bus, Desk(self._bus, self._tickets, self.name)
        await self.mailbox.start()
        cors = Cors((), keyless=True)
        app = Application(bus, self.mailbox, self._anyone, desk, cors)
        serving = await serve(app, host="127.0.0.1", port=0)

        async def alive(message: Message) -> None:
            await bus.publish(message.reply, b"")

        await bus.subscribe(subjects.streamer_alive(self.name), alive)
        entry = StreamerEntry(name=self.name, public_url=serving.url)
        await bus.store(f"$KV.{subjects.STREAMERS}.{self.name}", msgspec.json.encode(entry))
        return serving

    async def serve_ingress(self) -> Serving:
        """Serve the route of an ingress."""
        redirect = Redirect(self._bus, self._tickets, clock=time.monotonic)
        await redirect.start()
        app = Starlette(
            routes=[stream_route(self._anyone.identify, RestThere(redirect))],
            exception_handlers=EXCEPTION_HANDLERS,
        )
        return await serve(app, host="127.0.0.1", port=0)


Play = Callable[[Callable[[Made], Awaitable[None]]], None]


@pytest.fixture(params=["streamer", "ingress"])
def play(
    own_nats: NatsServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Play:
    """Play a scenario against a streamer, or against an ingress that sends clients there."""
    monkeypatch.setattr(topology, "ENTRY_TTL_S", 600)  # of one heartbeat

    async def run(test: Callable[[Made], Awaitable[None]]) -> None:
        settings = BusSettings(own_nats.url)
        async with asyncio.timeout(60), connection(settings, name="test", timeout_s=10) as bus:
            await topology.apply(bus)
            streamer = Streamer(bus)
            served = [await streamer.serve()]
            ticking = asyncio.create_task(streamer.mailbox.tick_forever())
            try:
                if request.param == "ingress":
                    served.insert(0, await streamer.serve_ingress())
                async with httpx.AsyncClient(
                    base_url=served[0].url, timeout=30, follow_redirects=True
                ) as http:
                    await test(Made(bus, http, streamer.mailbox))
                assert streamer.mailbox.open_count == 0
            finally:
                ticking.cancel()
                for each in served:
                    await each.close()

    return lambda test: uvloop.run(run(test))


def test_whoever_has_seen_the_end_of_a_stream_of_many_pages_gets_204(play: Play) -> None:
    assert PIECES * len(TEXT) > 3 * PAGE_BYTES_MAX

    async def test(made: Made) -> None:
        await made.make(PIECES)
        await made.finish(PIECES)
        status, reader, ids = await made.read(PIECES - 2)
        assert (status, reader.retry_ms) == (200, RETRY_MS)
        assert ids == [str(PIECES - 1), str(PIECES), None]
        status, reader, ids = await made.read(PIECES)
        assert (status, reader.retry_ms, ids) == (204, None, [])

    play(test)


def test_whoever_has_seen_all_there_is_of_a_running_one_waits_for_more(
    play: Play,
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

    play(test)


@pytest.mark.parametrize("last", [2, 4])
def test_an_error_at_the_end_is_told_though_every_token_was_seen(play: Play, last: int) -> None:
    async def test(made: Made) -> None:
        await made.make(5)
        await made.fail(5)
        status, reader, ids = await made.read(last)
        assert (status, reader.retry_ms) == (200, RETRY_MS)
        assert ids == [*(str(seq) for seq in range(last + 1, 5)), None]

    play(test)


def test_a_refusal_that_time_heals_is_an_event_and_to_others_a_status(play: Play) -> None:
    async def test(made: Made) -> None:
        await made.make(5)
        await made.finish(5)
        made.mailbox.draining = True
        async with made.open(2) as answer:
            body = await answer.aread()
        assert answer.status_code == 200
        assert body.startswith(b"retry: 1000\n")
        [event] = Reader().feed(body)
        assert (event.id, event.json["error"]["code"]) == (None, "draining")
        assert (await made.plain()).status_code == 503
        made.mailbox.draining = False
        assert (await made.read(5))[0] == 204

    play(test)


def test_who_asks_again_at_the_address_that_it_was_sent_to_goes_on_after_what_it_has(
    play: Play,
) -> None:
    async def test(made: Made) -> None:
        await made.make(5)
        async with made.open(1) as answer:
            await anext(answer.aiter_raw())
        await made.finish(5)
        for last, status, ids in (
            (3, 200, ["4", "5", None]),
            (3, 200, ["4", "5", None]),
            (5, 204, []),
        ):
            again = await made.open_again(answer, last)
            assert again.status_code == status
            assert [event.id for event in Reader().feed(again.content)] == ids

    play(test)
