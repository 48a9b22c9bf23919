"""A request whose worker dies goes on at another one, and whoever reads it cannot tell."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headrace import topology
from headrace.bus import Bus, BusSettings, connection
from schemas.reply import Complete, Event, Shown
from schemas.subjects import RequestSubject
from schemas.wire import (
    Envelope,
    HexPiece,
    Piece,
    Sampling,
    Shape,
    SimHook,
    Tokens,
    encode_envelope,
    span,
)
from streamer.attach import attach
from streamer.buffer import OpenReply
from streamer.collect import Collected
from streamer.mailbox import Mailbox
from tests.queue import simulated
from tests.servers import NatsServer
from tests.waiting import until
from tests.workers.running import running
from workers import generation, recovery
from workers.engine import Emit, Finish, Work
from workers.engine_sim import SimulatedEngine
from workers.recovery import past_of, read_log

pytestmark = pytest.mark.slow  # the lease must lapse

TOKENS = 12
FIRST = tuple(f"a{number:02} " for number in range(TOKENS))
OTHER = tuple(f"b{number:02} " for number in range(TOKENS))
EMOJI = ("hi ", HexPiece("f09f"), HexPiece("98"), HexPiece("80"), "! ", *FIRST[5:])


class Dying(SimulatedEngine):
    """An engine that makes so many tokens, each in a step of its own, and then none any more."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._left = tokens

    async def generate(self, work: Work, emit: Emit) -> Finish:
        async def some(pieces: Sequence[Piece]) -> None:
            for piece in pieces:
                if not self._left:
                    await asyncio.Event().wait()
                self._left -= 1
                await emit([piece])

        return await super().generate(work, some)


class Another(SimulatedEngine):
    """An engine that would not have said what the first one did."""

    async def generate(self, work: Work, emit: Emit) -> Finish:
        return await super().generate(replace(work, sim=SimHook(pieces=OTHER)), emit)


class Scene:
    """A broker, a streamer with the requests' clients, and workers that come and die."""

    def __init__(self, stack: AsyncExitStack, url: str, bus: Bus) -> None:
        self.stack = stack
        self.url = url
        self.bus = bus
        self.here = Mailbox(bus, "s")
        self.there = Mailbox(bus, "there")

    async def start(self) -> None:
        await topology.apply(self.bus)
        for mailbox in (self.here, self.there):
            await mailbox.start()
            ticking = asyncio.create_task(mailbox.tick_forever(), name="ticks")
            self.stack.callback(ticking.cancel)

    async def ask(self, envelope: Envelope) -> OpenReply:
        """Put a request into the queue, for a client at `here`."""
        reply = self.here.open(tenant="t", request=envelope.request, deadline_s=envelope.deadline_s)
        subject = RequestSubject("online", "sim", 3, "t", envelope.request)
        await self.bus.store(str(subject), encode_envelope(envelope))
        return reply

    async def begun(self, envelope: Envelope, *, tokens: int) -> OpenReply:
        """Have a worker make so many tokens, show and store them, and die; return the reply."""

        async def stored() -> bool:
            return (await past_of(self.bus, envelope)).next_seq == tokens

        async with AsyncExitStack() as life:
            await running(life, self.url, "first", Dying(tokens))
            reply = await self.ask(envelope)
            await until(lambda: reply.reply.next_seq == tokens)
            await until(stored)
        return reply

    async def replayed(self, envelope: Envelope) -> list[Event]:
        """Return what a client sees that comes after the end."""
        return await whole(await attach(self.bus, self.there, tenant="t", request=envelope.request))


async def whole(reply: OpenReply) -> list[Event]:
    """Return all that a client is given."""
    events: list[Event] = []
    while not events or isinstance(events[-1], Shown):
        events += await reply.next()
        assert reply.refusal is None
        reply.sent()
    return events


def answer(envelope: Envelope, events: Sequence[Event]) -> dict[str, Any]:
    """Return the object that a client of the whole answer is given, without its id."""
    collected = Collected(envelope.request, envelope.shape)
    for event in events[:-1]:
        assert isinstance(event, Shown)
        collected.add(event)
    assert isinstance(events[-1], Complete)
    found = collected.answer(events[-1])
    del found["id"]
    return found


def play(url: str, test: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(180):
            bus = await stack.enter_async_context(
                connection(BusSettings(url), name="test", timeout_s=10)
            )
            scene = Scene(stack, url, bus)
            await scene.start()
            await test(scene)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "SHOWN_TIMEOUT_S", 60.0)  # the streamer is here, and may be late
        asyncio.run(run())


def test_what_was_shown_and_is_gone_from_the_log_stands_and_is_in_the_log_again(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "CHECKPOINT_S", math.inf)  # nothing puts it back by itself

    async def test(scene: Scene) -> None:
        envelope = simulated(SimHook(pieces=FIRST), max_tokens=TOKENS)
        reply = await scene.begun(envelope, tokens=6)
        for seq, frame in await read_log(scene.bus, envelope.reply):
            if isinstance(frame, Tokens) and frame.seq + span(frame.pieces) > 3:
                await scene.bus.api("STREAM.MSG.DELETE.REPLIES", {"seq": seq})
        assert (await past_of(scene.bus, envelope)).next_seq == 3
        await running(scene.stack, scene.url, "other", Another())

        events = await whole(reply)
        shown = [event for event in events if isinstance(event, Shown)]
        assert [event.seq for event in shown] == list(range(TOKENS))
        assert [event.piece.text for event in shown] == [*FIRST[:6], *OTHER[6:]]
        assert isinstance(events[-1], Complete)
        assert await scene.replayed(envelope) == events
        history = await past_of(scene.bus, envelope)
        assert history.pieces == tuple(event.piece for event in shown)

    play(own_nats.url, test)


@pytest.mark.parametrize("sim", [SimHook(pieces=EMOJI), None], ids=["half an emoji", "a story"])
def test_tokens_log_probabilities_and_usage_are_those_of_an_undisturbed_request(
    own_nats: NatsServer, sim: SimHook | None
) -> None:
    def envelope() -> Envelope:
        return msgspec.structs.replace(
            simulated(SimHook()),
            sim=sim,
            sampling=Sampling(max_tokens=TOKENS, ignore_eos=True, logprobs=3),
            shape=Shape("chat", "sim", 5, True, 1, True),
        )

    async def test(scene: Scene) -> None:
        disturbed, undisturbed = envelope(), envelope()
        reply = await scene.begun(disturbed, tokens=3)
        other = await running(scene.stack, scene.url, "other", SimulatedEngine())
        events = await whole(reply)
        assert other.recovered == 1
        expected = await whole(await scene.ask(undisturbed))
        assert other.recovered == 1
        assert events == expected
        assert await scene.replayed(disturbed) == expected

        found = answer(disturbed, events)
        assert found == answer(undisturbed, expected)
        logprobs = found["choices"][0]["logprobs"]["content"]
        assert [len(token["top_logprobs"]) for token in logprobs] == [3] * TOKENS
        text = b"".join(bytes(token["bytes"]) for token in logprobs)
        assert sim is not None or text.decode() == found["choices"][0]["message"]["content"]
        assert found["usage"]["completion_tokens"] == TOKENS

    play(own_nats.url, test)
