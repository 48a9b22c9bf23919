"""Claims of idempotency keys on a real broker: who runs, who attaches, when a key is free again."""

import asyncio
import math
import time
from collections.abc import Iterator

import msgspec
import pytest

from headrace import journal, topology
from headrace.bus import Bus
from headrace.kept import keep
from ingress import idempotency
from ingress.idempotency import Attach, Claim, Keyed, Keys, Seen, Standing, key_of, keyed
from schemas.errors import BrokerUnavailable, IdempotencyConflict, InvalidRequest, QueueFull
from schemas.subjects import ReplySubject, RequestSubject, claim_key, claimant_of, new_request_id
from schemas.wire import Failed, Finished, Frame, Shape, Started, Usage, encode_frame
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until

STARTED = Started(7, "w", 0, Shape("chat", "m", 5, False, 1, False))
FINISHED = Finished(7, 0, (), ("stop",), Usage(1, 0, 0), {})
FAILED = Failed(7, 0, (), "request_cancelled", "why", Usage(1, 0, 0))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = NatsServer(tmp_path_factory.mktemp("idempotency"))
    server.start()
    with_bus(server.url, topology.apply)
    yield server.url
    server.stop()


class Begun:
    """What `begin` returns; it may be dropped."""

    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


class Client:
    """One POST with a key, whose request is queued as it would be, and never run."""

    def __init__(self, bus: Bus, *, key: str, tenant: str = "t", body: bytes = b"{}") -> None:
        self.bus = bus
        self.request = new_request_id()
        self.begun = Begun()
        self.begins = 0
        asked = keyed(
            [(b"idempotency-key", key.replace(" ", "-").encode())],
            tenant=tenant,
            request=self.request,
            deadline_s=time.time() + 600,
            path="/v1/completions",
            body=body,
        )
        assert asked is not None
        self.asked: Keyed = asked
        self.claim_key = claim_key(tenant=tenant, digest=asked.key_digest)

    async def ask(self) -> Begun | Attach:
        async with asyncio.timeout(30):
            return await Keys(self.bus).once(self.asked, self.begin)

    async def begin(self) -> Begun:
        self.begins += 1
        await self.queue()
        return self.begun

    async def queue(self) -> None:
        subject = RequestSubject("online", "m", 1, self.asked.tenant, self.request)
        await self.bus.store(str(subject), b"")

    async def leave_queue(self) -> None:
        assert await self.bus.purge("REQUESTS", f"requests.*.*.*.*.{self.request}") == 1

    async def log(self, *frames: Frame) -> None:
        for frame in frames:
            subject = ReplySubject("s", self.asked.tenant, self.request)
            await self.bus.store(str(subject), encode_frame(frame))

    async def stands(self) -> Claim | None:
        """Return the claim under the key."""
        found = await journal.read(self.bus, "KV_responses", self.claim_key)
        alive = [entry.data for entry in found if not entry.deleted]
        return msgspec.json.decode(alive[-1], type=Claim) if alive else None

    async def stake(self, *, accepted: bool) -> None:
        """Write a claim as an ingress would, and no more."""
        claim = Claim(
            self.request, self.asked.body_digest, time.time(), self.asked.deadline_s, accepted
        )
        await self.bus.store(self.claim_key, msgspec.json.encode(claim))

    @property
    def attach(self) -> Attach:
        """Where another client goes while this request runs."""
        return Attach(self.request, self.asked.deadline_s)


class Looking(Keys):
    """Counts its looks at where a claim's request stands."""

    looks = 0

    async def _look(self, tenant: str, claim: Claim) -> Seen:
        self.looks += 1
        return await super()._look(tenant, claim)


async def begun(bus: Bus, key: str) -> Client:
    """Return a client whose request is in the queue."""
    first = Client(bus, key=key)
    assert await first.ask() is first.begun
    return first


def test_the_first_runs_and_the_second_attaches_with_the_firsts_deadline(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        first, second = await begun(bus, "first"), Client(bus, key="first")
        claim = await first.stands()
        assert claim is not None
        assert (claim.request, claim.accepted) == (first.request, True)
        assert await second.ask() == first.attach
        assert (first.begins, second.begins) == (1, 0)

    with_bus(url, scenario)


def test_a_key_is_its_tenants_own(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        await begun(bus, "shared")
        other = Client(bus, key="shared", tenant="another", body=b"other")
        assert await other.ask() is other.begun

    with_bus(url, scenario)


@pytest.mark.parametrize("age", ["admitting", "queued", "ended", "kept"])
def test_another_body_is_409_as_long_as_there_is_an_answer(url: str, age: str) -> None:
    async def scenario(bus: Bus) -> None:
        first = Client(bus, key=f"body {age}")
        if age == "admitting":
            await first.stake(accepted=False)
            await _answer(bus, first)
        else:
            await first.ask()
        if age in ("ended", "kept"):
            await first.log(STARTED, FINISHED)
        if age == "kept":
            await _keep(bus, first, FINISHED)
            await first.leave_queue()
            await bus.purge("REPLIES", f"replies.*.*.{first.request}")
        other = Client(bus, key=f"body {age}", body=b"[]")
        with pytest.raises(IdempotencyConflict):
            await other.ask()
        assert other.begins == 0

    with_bus(url, scenario)


async def _answer(bus: Bus, client: Client) -> None:
    async def here(message: object) -> None:
        await bus.publish(message.reply, b"here")  # type: ignore[attr-defined]

    await bus.subscribe(claimant_of(tenant="t", request=client.request), here)


async def _keep(bus: Bus, client: Client, end: Frame) -> None:
    frames = [encode_frame(STARTED), encode_frame(end)]
    await keep(bus, tenant="t", request=client.request, frames=frames)


@pytest.mark.parametrize("kept", [True, False])
def test_a_finished_request_is_attached_to_without_a_deadline(url: str, kept: bool) -> None:
    async def scenario(bus: Bus) -> None:
        first = await begun(bus, f"finished {kept}")
        await first.leave_queue()
        if kept:
            await _keep(bus, first, FINISHED)
        else:
            await first.log(STARTED, FINISHED)
        second = Client(bus, key=f"finished {kept}")
        assert await second.ask() == Attach(first.request, math.inf)

    with_bus(url, scenario)


@pytest.mark.parametrize("how", ["failed", "kept as failed", "cancelled before it began"])
def test_what_failed_or_was_cancelled_gives_its_key_back_to_any_body(url: str, how: str) -> None:
    async def scenario(bus: Bus) -> None:
        first = await begun(bus, how)
        await first.leave_queue()
        if how == "failed":
            await first.log(STARTED, FAILED)
        elif how == "kept as failed":
            await _keep(bus, first, FAILED)
        second = Client(bus, key=how, body=b"[]")
        assert await second.ask() is second.begun
        third = Client(bus, key=how, body=b"[]")
        assert await third.ask() == second.attach

    with_bus(url, scenario)


def test_a_refused_request_gives_its_key_back_at_once(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        first = Client(bus, key="refused")

        async def refuse() -> Begun:
            assert await first.stands() is not None
            raise QueueFull("full")

        with pytest.raises(QueueFull):
            await Keys(bus).once(first.asked, refuse)
        assert await first.stands() is None
        second = Client(bus, key="refused", body=b"[]")
        assert await second.ask() is second.begun

    with_bus(url, scenario)


@pytest.mark.parametrize("refused", [True, False])
def test_who_comes_while_the_first_is_admitted_waits_and_attaches_or_runs(
    url: str, refused: bool
) -> None:
    async def scenario(bus: Bus) -> None:
        key = f"meanwhile {refused}"
        first, second = Client(bus, key=key), Client(bus, key=key)
        go = asyncio.Event()

        async def begin() -> Begun:
            await go.wait()
            if refused:
                raise QueueFull("full")
            return await first.begin()

        running = asyncio.create_task(Keys(bus).once(first.asked, begin))
        await until(first.stands)
        waiting = asyncio.create_task(second.ask())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        go.set()
        if refused:
            assert await waiting is second.begun
            with pytest.raises(QueueFull):
                await running
        else:
            assert await waiting == first.attach
            assert await running is first.begun

    with_bus(url, scenario)


def test_the_claim_of_an_ingress_that_died_before_the_queue_is_taken_over(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        dead, second = Client(bus, key="dead"), Client(bus, key="dead", body=b"[]")
        await dead.stake(accepted=False)
        assert await second.ask() is second.begun

    with_bus(url, scenario)


def test_a_request_whose_ingress_died_after_the_queue_took_it_is_attached_to(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        dead, second = Client(bus, key="dead later"), Client(bus, key="dead later")
        await dead.stake(accepted=False)
        await dead.queue()
        assert await second.ask() == dead.attach

    with_bus(url, scenario)


def test_an_ingress_that_was_cut_off_finds_its_claim_taken_and_cancels_its_own(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        cut, other = Client(bus, key="cut"), Client(bus, key="cut")

        async def begin() -> Begun:
            await other.stake(accepted=True)
            await other.queue()
            return await cut.begin()

        assert await Keys(bus).once(cut.asked, begin) == other.attach
        assert cut.begun.dropped
        left = await journal.read(bus, "REQUESTS", f"requests.*.*.*.t.{cut.request}")
        assert left == []

    with_bus(url, scenario)


def test_a_request_gone_without_an_end_is_waited_for_a_moment_only(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bus: Bus) -> None:
        first = await begun(bus, "gone")
        await first.leave_queue()
        await first.log(STARTED)
        second = Client(bus, key="gone")
        monkeypatch.setattr(idempotency, "ENDING_S", 60.0)
        keys = Looking(bus)
        waiting = asyncio.create_task(keys.once(second.asked, second.begin))
        await until(lambda: keys.looks > 1)
        assert not waiting.done()
        monkeypatch.setattr(idempotency, "ENDING_S", 0.0)
        third = Client(bus, key="gone")
        assert await third.ask() is third.begun
        assert await waiting == third.attach

    with_bus(url, scenario)


def test_a_claim_that_cannot_be_read_is_taken_over(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        client = Client(bus, key="foreign")
        await bus.store(client.claim_key, b"not ours")
        assert await client.ask() is client.begun

    with_bus(url, scenario)


def test_a_hundred_at_once_are_one_run(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        clients = [Client(bus, key="hundred") for _ in range(100)]
        answers = await asyncio.gather(*(client.ask() for client in clients))
        [first] = [client for client in clients if client.begins]
        assert answers.count(first.attach) == 99

    with_bus(url, scenario)


def test_without_a_broker_a_key_is_refused_and_may_be_tried_again(own_nats: NatsServer) -> None:
    async def scenario(bus: Bus) -> None:
        own_nats.stop()
        with pytest.raises(BrokerUnavailable):
            await Client(bus, key="away").ask()

    with_bus(own_nats.url, scenario)


@pytest.mark.parametrize(
    ("seen", "standing"),
    [
        (Seen(False, True, "finished", False, None), Standing.THERE),
        (Seen(False, True, "failed", True, None), Standing.FREE),
        (Seen(False, False, None, False, "finished"), Standing.THERE),
        (Seen(False, False, None, False, "failed"), Standing.FREE),
        (Seen(True, False, None, True, None), Standing.THERE),
        (Seen(False, True, None, True, None), Standing.THERE),
        (Seen(False, True, None, False, None), Standing.ENDING),
        (Seen(True, False, None, False, None), Standing.ADMITTING),
        (Seen(False, False, None, False, None), Standing.FREE),
    ],
)
def test_what_is_found_says_where_a_request_stands(seen: Seen, standing: Standing) -> None:
    assert idempotency.standing_of(seen) is standing


@pytest.mark.parametrize(
    "key", [b"", b" ", b"a b", b"a\t", b"\x7f", b"\x1f", "é".encode(), b"x" * 256, b"a\n"]
)
def test_a_key_is_visible_ascii_of_at_most_255_characters(key: bytes) -> None:
    with pytest.raises(InvalidRequest) as raised:
        key_of([(b"idempotency-key", key)])
    assert raised.value.param == "Idempotency-Key"


def test_a_key_is_one_header_or_none() -> None:
    assert key_of([(b"x", b"y")]) is None
    assert key_of([(b"idempotency-key", b"!" + b"~" * 254)]) == b"!" + b"~" * 254
    with pytest.raises(InvalidRequest):
        key_of([(b"idempotency-key", b"a"), (b"idempotency-key", b"a")])


def test_a_frozen_ingress_holds_its_claim_for_a_bounded_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bus: Bus) -> None:
        monkeypatch.setattr(idempotency, "ASK_S", 0.02)
        frozen, second = Client(bus, key="frozen"), Client(bus, key="frozen")

        async def silent(message: object) -> None:
            """Hear the question and say nothing."""

        await bus.subscribe(claimant_of(tenant="t", request=frozen.request), silent)
        await frozen.stake(accepted=False)
        waiting = asyncio.create_task(second.ask())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        monkeypatch.setattr(idempotency, "FROZEN_S", 0.0)
        assert await waiting is second.begun

    with_bus(url, scenario)
