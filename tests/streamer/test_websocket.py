"""Sockets of both kinds on a real port and a real broker, with an ingress that does as the test
says: how they end, and what a client is told by the code."""

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
import uvloop

from headrace import topology, websocket
from headrace.bus import Bus, BusSettings, connection
from headrace.http import WebSocketDoor, serve
from schemas.admit import AdmittedResponse, Caller
from schemas.errors import Refusal, TooManyRequests
from schemas.subjects import ReplySubject
from schemas.wire import Finished, Piece, Shape, Started, Tokens, Usage, encode_frame
from streamer import buffer
from streamer.admission import Left, RemoteAdmission
from streamer.buffer import OpenReply
from streamer.mailbox import Mailbox
from streamer.response_socket import TURNS_BYTES_MAX
from streamer.rooms import ROOMS
from streamer.sockets import Sockets
from tests.servers import NatsServer
from tests.talk import RESPONSES, talking
from tests.waiting import until

SHAPE = Shape("completion", "m", 5, False, 1, False)
RESPONSE_SHAPE = Shape("response", "m", 5, False, 1, False, response=b'{"background":false}')

both = pytest.mark.parametrize("path", ["/v1/completions", RESPONSES])


class Ingress:
    """An `Admission` that lets all in; every request is run at once, and says `pieces` times the
    `text`."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.refuse_request: Exception | None = None
        self.text = "t"
        self.pieces = 3
        self.ends = True
        self.bodies: list[bytes] = []
        self.made_from: bytes | None = None
        self.turn = asyncio.Event()
        self.turn.set()

    async def identify(
        self, headers: Sequence[tuple[bytes, bytes]], *, peer: str | None = None
    ) -> Caller | None:
        return Caller("t")

    async def identify_key(self, key: str) -> Caller:
        return Caller("t")

    async def admit(
        self,
        caller: Caller,
        body: bytes,
        *,
        chat: bool,
        request: str,
        streamer: str,
        deadline_s: float,
        left: Left,
    ) -> str:
        self.bodies.append(body)
        del body
        await self.turn.wait()
        await self._run(ReplySubject(streamer, caller.tenant, request), SHAPE)
        return SHAPE.model

    async def admit_response(
        self,
        caller: Caller,
        body: bytes,
        *,
        request: str,
        streamer: str,
        deadline_s: float,
        before: bytes | None,
        left: Left,
    ) -> AdmittedResponse:
        self.bodies.append(body)
        del body
        await self.turn.wait()
        await self._run(ReplySubject(streamer, caller.tenant, request), RESPONSE_SHAPE)
        return AdmittedResponse(RESPONSE_SHAPE, self.made_from)

    async def _run(self, reply: ReplySubject, shape: Shape) -> None:
        if self.refuse_request is not None:
            raise self.refuse_request
        subject = str(reply)
        claim = await self.bus.store(subject, encode_frame(Started(0, "w", 0, shape)))
        for seq in range(self.pieces):
            piece = Piece(0, self.text, (seq,))
            await self.bus.publish(subject, encode_frame(Tokens(claim.seq, seq, (piece,))))
        if not self.ends:
            return
        usage = Usage(1, self.pieces, 0)
        end = Finished(claim.seq, self.pieces, (), ("stop",), usage, {})
        await self.bus.publish(subject, encode_frame(end))


class Door:
    """Sockets that are served, and what is behind them."""

    def __init__(self, bus: Bus, sockets_max: int) -> None:
        self.mailbox = Mailbox(bus, f"s-{time.monotonic_ns()}")
        self.ingress = Ingress(bus)
        self.sockets = Sockets(self.mailbox, self.ingress, rooms=ROOMS, sockets_max=sockets_max)
        self.url = ""


@contextlib.asynccontextmanager
async def opened(url: str, sockets_max: int) -> AsyncIterator[Door]:
    async with connection(BusSettings(url), name="test", timeout_s=10) as bus:
        await topology.apply(bus)
        door = Door(bus, sockets_max)
        await door.mailbox.start()
        ticking = asyncio.create_task(door.mailbox.tick_forever())
        websocket = WebSocketDoor(door.sockets)
        serving = await serve(door.sockets, host="127.0.0.1", port=0, websocket=websocket)
        door.url = serving.url
        try:
            yield door
        finally:
            ticking.cancel()
            await serving.close(grace_s=0)


def at_door(
    server: NatsServer, test: Callable[[Door], Awaitable[None]], *, sockets_max: int = 100
) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), opened(server.url, sockets_max) as door:
            await test(door)

    uvloop.run(run())


@both
def test_one_socket_too_many_closes_with_1013(own_nats: NatsServer, path: str) -> None:
    async def test(door: Door) -> None:
        async with talking(door.url, path) as first:
            async with talking(door.url, path) as second:
                assert await second.end() == 1013
            assert (await first.ask("a", {})).text() == "ttt"
        await until(lambda: not door.sockets.open_count)
        async with talking(door.url, path) as third:
            assert (await third.ask("a", {})).text() == "ttt"

    at_door(own_nats, test, sockets_max=1)


@both
def test_no_ingress_to_ask_closes_with_1013(own_nats: NatsServer, path: str) -> None:
    async def test(door: Door) -> None:
        door.sockets.admission = RemoteAdmission(door.ingress.bus, local=True, patience_s=30)
        async with talking(door.url, path) as talk:
            assert await talk.end() == 1013

    at_door(own_nats, test)


@both
@pytest.mark.parametrize("fault", [TooManyRequests("Later."), ValueError("our fault")])
def test_a_refused_or_failed_admission_ends_its_request_alone(
    own_nats: NatsServer, path: str, fault: Exception
) -> None:
    async def test(door: Door) -> None:
        async with talking(door.url, path) as talk:
            door.ingress.refuse_request = fault
            error = (await talk.ask("a", {})).error
            assert error is not None
            expected = fault.code if isinstance(fault, Refusal) else "internal_error"
            assert error["code"] == expected
            door.ingress.refuse_request = None
            assert (await talk.ask("a", {})).text() == "ttt"
        await until(lambda: not door.mailbox.open_count)

    at_door(own_nats, test)


@both
def test_a_fault_of_the_socket_itself_closes_with_1011(
    own_nats: NatsServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(door: Door) -> None:
        def fail(**_: object) -> None:
            raise ValueError("our fault")

        async with talking(door.url, path) as talk:
            assert (await talk.ask("a", {})).text() == "ttt"
            monkeypatch.setattr(door.mailbox, "open", fail)
            await talk.begin("b", {})
            assert await talk.end() == 1011

    at_door(own_nats, test)


@pytest.mark.slow
@both
def test_a_client_that_does_not_read_is_cut_and_leaves_nothing(
    own_nats: NatsServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "CLOSE_S", 60.0)  # it reads in the end

    async def test(door: Door) -> None:
        door.ingress.text, door.ingress.pieces = "x" * 50_000, 200
        async with talking(door.url, path) as talk:
            talk.socket.transport.pause_reading()
            for number in range(3):
                await talk.begin(f"{number}", {})
            await until(lambda: door.mailbox.opened == 3)
            monkeypatch.setattr(buffer, "STALLED_S_MAX", 1.0)  # all are there to be cut
            await until(lambda: not door.mailbox.open_count, within_s=20)
            await until(lambda: not door.sockets.open_count)
            talk.socket.transport.resume_reading()
            assert await talk.end() == 1011

    at_door(own_nats, test)


@both
def test_a_client_that_closes_without_reading_has_left(
    own_nats: NatsServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had yet to read kept its requests running until it counted as stalled."""
    monkeypatch.setattr(buffer, "STALLED_S_MAX", math.inf)

    def is_stuck(reply: OpenReply) -> bool:  # writes go on again only below that
        return reply.connection is not None and reply.connection.unsent_bytes > 16_384

    async def test(door: Door) -> None:
        door.ingress.text, door.ingress.pieces = "x" * 500_000, 60
        async with talking(door.url, path) as talk:
            talk.socket.transport.pause_reading()
            await talk.begin("a", {})
            await until(lambda: any(map(is_stuck, door.mailbox.replies)))
            talk.socket.protocol.send_close(1000)
            talk.socket.transport.write(b"".join(talk.socket.protocol.data_to_send()))
            await until(lambda: not door.mailbox.open_count)
            talk.socket.transport.abort()

    at_door(own_nats, test)


@both
def test_the_body_of_a_request_is_not_kept_while_it_is_answered(
    own_nats: NatsServer, path: str
) -> None:
    """Of 256 long prompts on a socket each was held to the end of its stream."""

    async def test(door: Door) -> None:
        door.ingress.ends = False
        async with talking(door.url, path) as talk:
            await talk.begin("a", {"user": "x" * 100_000})
            await until(lambda: any(each.tokens for each in door.mailbox.replies))
            [body] = door.ingress.bodies
            door.ingress.bodies.clear()
            assert len(body) > 100_000
            assert sys.getrefcount(body) == 2  # here, and as the argument

    at_door(own_nats, test)


@both
def test_the_body_of_a_request_is_not_kept_while_it_waits_for_its_turn(
    own_nats: NatsServer, path: str
) -> None:
    async def test(door: Door) -> None:
        door.ingress.turn.clear()
        async with talking(door.url, path) as talk:
            await talk.begin("a", {"user": "x" * 100_000})
            await until(lambda: door.ingress.bodies)
            body = door.ingress.bodies.pop()
            assert len(body) > 100_000
            assert sys.getrefcount(body) == 2  # here, and as the argument

    at_door(own_nats, test)


def test_what_no_later_turn_can_go_on_from_is_not_kept_while_it_is_answered(
    own_nats: NatsServer,
) -> None:
    """A conversation over the bound of a socket's turns was held to the end, and then forgotten."""

    async def test(door: Door) -> None:
        door.ingress.ends = False
        conversation = bytes(TURNS_BYTES_MAX + 1)
        door.ingress.made_from = conversation
        async with talking(door.url, "/v1/responses") as talk:
            await talk.begin("a", {"store": False})
            await until(lambda: any(each.tokens for each in door.mailbox.replies))
            door.ingress.made_from = None
            assert sys.getrefcount(conversation) == 2  # here, and as the argument

    at_door(own_nats, test)
