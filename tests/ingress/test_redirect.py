"""Which streamer a client is sent to: a real broker, and streamers that only say they live."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import pytest
from starlette.responses import Response

from headrace import topology
from headrace.bus import Bus, Subscription
from headrace.ticket import Tickets
from ingress.handoff import Answer, Expected, Handoff
from ingress.redirect import FOLLOW_S, Redirect
from schemas import subjects
from schemas.errors import NoStreamers
from schemas.model import StreamerEntry
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until

TICKETS = Tickets(secrets.token_bytes(32))


class Clock:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Streamer:
    """A streamer's heartbeat and its answer to whether it lives."""

    def __init__(self, bus: Bus, name: str, url: str | None = None) -> None:
        self.name = name
        self._bus = bus
        self._url = url or f"http://{name}"
        self._answering: Subscription | None = None

    async def start(self, *, open_streams: int = 0, answers: bool = True) -> None:
        async def alive(message: Any) -> None:
            if answers:
                await self._bus.publish(message.reply, b"")

        self._answering = await self._bus.subscribe(subjects.streamer_alive(self.name), alive)
        await self.tell(open_streams=open_streams)

    async def tell(self, *, open_streams: int = 0, draining: bool = False) -> None:
        entry = StreamerEntry(
            name=self.name, public_url=self._url, open_streams=open_streams, draining=draining
        )
        # As a heartbeat, but stored when this returns.
        await self._bus.store(f"$KV.{subjects.STREAMERS}.{self.name}", msgspec.json.encode(entry))

    async def die(self) -> None:
        assert self._answering is not None
        await self._answering.unsubscribe()


def redirect(bus: Bus) -> Redirect:
    return Redirect(bus, TICKETS, clock=time.monotonic)


async def begin(by: Redirect) -> None:
    """Start it, and have it hear of every streamer that lives, however busy this machine is."""
    await by.start()
    async with asyncio.timeout(60):
        while by._slow:
            await by._probe()


def chosen(by: Redirect) -> str:
    return by.expect(tenant="t", request="req_1", deadline_s=1.0, keep=False).streamer


def names(by: Redirect) -> list[str]:
    return sorted(entry.name for entry in by.live)


Scenario = Callable[[Bus], Awaitable[None]]


@pytest.fixture
def play(own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    """Play a scenario on a broker of its own: its streamers are all that there are, and each has
    but one heartbeat."""
    monkeypatch.setattr(topology, "ENTRY_TTL_S", 600)

    async def prepared(bus: Bus, scenario: Scenario) -> None:
        await topology.apply(bus)
        await scenario(bus)

    def run(scenario: Scenario) -> None:
        with_bus(own_nats.url, lambda bus: prepared(bus, scenario))

    return run


def test_without_a_streamer_a_request_is_refused_and_told_when_to_come_again(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(bus: Bus) -> None:
        by = redirect(bus)
        await by.start()
        with pytest.raises(NoStreamers) as refused:
            chosen(by)
        assert (refused.value.status, refused.value.code) == (503, "no_streamers")
        assert refused.value.retry_after_s is not None

    play(scenario)


def test_two_ingress_send_to_the_least_loaded_counting_what_they_sent(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(bus: Bus) -> None:
        full, idle = Streamer(bus, "a"), Streamer(bus, "b")
        await full.start(open_streams=10)
        await idle.start()
        both = [Redirect(bus, TICKETS, clock=Clock()) for _ in range(2)]
        for by in both:
            await begin(by)
            assert [chosen(by) for _ in range(10)] == ["b"] * 10
            assert sorted(chosen(by) for _ in range(10)) == ["a"] * 5 + ["b"] * 5

    play(scenario)


def test_what_one_streamer_tells_does_not_make_another_ones_load_forgotten(
    play: Callable[[Scenario], None],
) -> None:
    """Any change of any entry cleared all counts, so bursts went to one streamer."""

    async def scenario(bus: Bus) -> None:
        first, second = Streamer(bus, "a"), Streamer(bus, "b")
        await first.start()
        await second.start(open_streams=4)
        by = redirect(bus)
        await begin(by)
        assert [chosen(by) for _ in range(4)] == ["a"] * 4
        await second.tell(open_streams=3)
        await until(lambda: by._streamers.entries["b"].open_streams == 3)
        assert chosen(by) == "b"

    play(scenario)


def test_the_same_heartbeat_again_counts_as_told(play: Callable[[Scenario], None]) -> None:
    """Only a changed entry cleared the count, so short requests added up for ever."""

    async def scenario(bus: Bus) -> None:
        first, second = Streamer(bus, "a"), Streamer(bus, "b")
        await first.start()
        await second.start(open_streams=2)
        clock = Clock()
        by = Redirect(bus, TICKETS, clock=clock)
        await begin(by)
        assert [chosen(by) for _ in range(2)] == ["a"] * 2
        clock.now_s += FOLLOW_S + 0.1
        await first.tell()
        await until(lambda: not by._sent)
        assert [chosen(by) for _ in range(2)] == ["a"] * 2

    play(scenario)


def test_a_client_on_its_way_counts_although_its_streamer_has_told_of_none(
    play: Callable[[Scenario], None],
) -> None:
    """A heartbeat between redirect and client made the same streamer look idle again."""

    async def scenario(bus: Bus) -> None:
        first, second = Streamer(bus, "a"), Streamer(bus, "b")
        await first.start()
        await second.start()
        clock = Clock()
        by = Redirect(bus, TICKETS, clock=clock)
        await begin(by)
        assert chosen(by) == "a"
        for _ in range(3):
            await first.tell()
        await second.tell(open_streams=1)
        await until(lambda: by._streamers.entries["b"].open_streams == 1)
        await second.tell()
        await until(lambda: by._streamers.entries["b"].open_streams == 0)
        assert chosen(by) == "b"

    play(scenario)


def test_a_refused_request_is_not_counted(play: Callable[[Scenario], None]) -> None:
    async def scenario(bus: Bus) -> None:
        for name in "ab":
            await Streamer(bus, name).start()
        by = redirect(bus)
        await begin(by)
        for _ in range(5):
            by.expect(tenant="t", request="req_1", deadline_s=1.0, keep=False).drop()
        assert not any(by._sent.values())
        # Among equals it goes round.
        assert [chosen(by) for _ in range(4)] == ["b", "a", "b", "a"]

    play(scenario)


def test_a_killed_streamer_gets_no_clients_long_before_its_heartbeats_are_missed(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(bus: Bus) -> None:
        dead, alive = Streamer(bus, "a"), Streamer(bus, "b")
        await dead.start()
        await alive.start(open_streams=100)
        by = redirect(bus)  # whose clock no heartbeat is missed by: nobody calls `tick`
        await begin(by)
        probing = asyncio.create_task(by.probe_forever())
        try:
            await until(lambda: names(by) == ["a", "b"])
            assert chosen(by) == "a"
            await dead.die()
            await until(lambda: names(by) == ["b"])
            assert chosen(by) == "b"
            await alive.die()
            await until(lambda: names(by) == [])
            with pytest.raises(NoStreamers):
                chosen(by)
            await dead.start()
            await until(lambda: names(by) == ["a"])
        finally:
            probing.cancel()

    play(scenario)


@pytest.mark.slow
def test_a_silent_streamer_is_used_when_there_is_no_other(
    play: Callable[[Scenario], None],
) -> None:
    """On a machine short of CPU all streamers answered late, and every request was 503."""

    async def scenario(bus: Bus) -> None:
        frozen, other = Streamer(bus, "a"), Streamer(bus, "b")
        await frozen.start(answers=False)
        await other.start(open_streams=100)
        by = redirect(bus)
        await by.start()

        async def found_silent() -> bool:
            await by._probe()
            return names(by) == ["b"]

        await until(found_silent)
        assert chosen(by) == "b"
        await other.tell(draining=True)
        await until(lambda: names(by) == ["a"])
        assert chosen(by) == "a"

    play(scenario)


def test_what_took_a_dead_streamers_place_at_its_url_takes_its_clients(
    play: Callable[[Scenario], None],
) -> None:
    """Its tickets would be another one's: 410 for each client until the dead one was forgotten."""

    async def scenario(bus: Bus) -> None:
        await Streamer(bus, "z-old", "http://one").start()
        by = redirect(bus)
        await by.start()
        assert chosen(by) == "z-old"
        await Streamer(bus, "a-new", "http://one").start()
        await until(lambda: names(by) == ["a-new"])

    play(scenario)


def test_a_draining_streamer_gets_no_more(play: Callable[[Scenario], None]) -> None:
    async def scenario(bus: Bus) -> None:
        only = Streamer(bus, "a")
        await only.start()
        by = redirect(bus)
        await by.start()
        await only.tell(draining=True)
        await until(lambda: names(by) == [])

    play(scenario)


def test_a_broker_that_was_away_is_not_taken_for_dead_streamers(
    own_nats: NatsServer, play: Callable[[Scenario], None]
) -> None:
    async def scenario(bus: Bus) -> None:
        await Streamer(bus, "a").start()
        by = redirect(bus)
        await by.start()
        probing = asyncio.create_task(by.probe_forever())
        try:
            await asyncio.to_thread(own_nats.stop)
            await until(lambda: not bus.connected)
            assert chosen(by) == "a"
            await asyncio.to_thread(own_nats.start)
            await until(lambda: bus.connected)
            await until(lambda: names(by) == ["a"])
        finally:
            probing.cancel()

    play(scenario)


class _Accel:
    """What a handoff for nginx needs is what the protocol gives: this one is not for use."""

    def __init__(self, inner: Redirect) -> None:
        self._inner = inner

    def expect(self, *, tenant: str, request: str, deadline_s: float, keep: bool) -> Expected:
        return _AccelExpected(
            self._inner.expect(tenant=tenant, request=request, deadline_s=deadline_s, keep=keep)
        )

    async def attach(
        self,
        *,
        tenant: str,
        request: str,
        deadline_s: float,
        stream: bool,
        headers: Mapping[str, str],
    ) -> Answer:
        answer = await self._inner.attach(
            tenant=tenant,
            request=request,
            deadline_s=deadline_s,
            stream=stream,
            headers=headers,
        )
        return _accelerated(answer, headers)


class _AccelExpected:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def streamer(self) -> str:
        return str(self._inner.streamer)

    def answer(self, *, stream: bool, headers: Mapping[str, str], lingers: bool = False) -> Answer:
        answer = self._inner.answer(stream=stream, headers=headers, lingers=lingers)
        return _accelerated(answer, headers)

    def drop(self) -> None:
        self._inner.drop()


def _accelerated(answer: Response, headers: Mapping[str, str]) -> Response:
    path = answer.headers["location"].removeprefix("http:/")
    return Response(headers={"x-accel-redirect": path, **headers})


def test_the_protocol_of_a_handoff_suffices_for_one_by_x_accel_redirect(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(bus: Bus) -> None:
        await Streamer(bus, "a").start()
        by = redirect(bus)
        await by.start()
        handoff: Handoff = _Accel(by)
        expected = handoff.expect(tenant="t", request="req_1", deadline_s=1.0, keep=False)
        answer: Any = expected.answer(stream=True, headers={"x-request-id": "req_1"})
        assert answer.status_code == 200
        assert answer.headers["x-accel-redirect"].startswith("/a/v1/replies/")
        request = subjects.new_request_id()
        more: Any = await handoff.attach(
            tenant="t", request=request, deadline_s=1.0, stream=True, headers={}
        )
        assert more.headers["x-accel-redirect"].startswith("/a/v1/replies/")

    play(scenario)
