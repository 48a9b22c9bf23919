"""Accounts that several nodes share: the sum keeps the limit, and what is away is told."""

import asyncio
import time
from collections.abc import Callable

import pytest

from headrace import topology, versioned
from headrace.bus import Bus, BusSettings, Message, connection
from ingress import reservations
from ingress.limits import Limits, Standing, Standings
from ingress.reservations import Reservations
from schemas import subjects
from schemas.errors import BrokerUnavailable, TooManyRequests
from schemas.subjects import new_request_id
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until


def _of(rules: Limits) -> Callable[[str], Limits]:
    return lambda tenant: rules


async def _ask(node: Reservations, tenant: str, *, tokens: int = 10) -> str | None:
    """Reserve; return the request's id, None if it was refused."""
    request = new_request_id()
    try:
        await node.reserve(tenant, request=request, tokens=tokens, deadline_s=time.time() + 60)
    except TooManyRequests:
        return None
    return request


async def _account(bus: Bus, tenant: str) -> bytes | None:
    return (await versioned.read(bus, subjects.LIMITS, tenant)).data


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(
    "rules",
    [Limits(requests_per_minute=5), Limits(tokens_per_minute=50), Limits(concurrent_requests=5)],
)
def test_of_fifty_at_once_exactly_five_fit(nats_url: str, nodes: int, rules: Limits) -> None:
    async def run() -> None:
        settings = BusSettings(nats_url)
        async with (
            connection(settings, name="a") as a,
            connection(settings, name="b") as b,
            connection(settings, name="c") as c,
        ):
            await topology.apply(a)
            tenant = f"fifty-{nodes}-{rules}".translate({ord(sign): "_" for sign in " (),="})
            pool = [
                Reservations(bus, _of(rules), clock=lambda: 1000.0) for bus in (a, b, c)[:nodes]
            ]
            asks = [_ask(pool[n % nodes], tenant) for n in range(50)]
            outcomes = await asyncio.gather(*asks)
            assert sum(outcome is not None for outcome in outcomes) == 5

    asyncio.run(run())


def test_a_hundred_refused_leave_the_account_as_it_was(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        node = Reservations(bus, _of(Limits(tokens_per_minute=50)), clock=lambda: 1000.0)
        assert await _ask(node, "hundred", tokens=45) is not None
        before = await versioned.read(bus, subjects.LIMITS, "hundred")
        outcomes = await asyncio.gather(*[_ask(node, "hundred") for _ in range(100)])
        assert outcomes == [None] * 100
        assert await versioned.read(bus, subjects.LIMITS, "hundred") == before

    with_bus(nats_url, run)


def test_what_one_node_reserves_another_settles(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        rules = Limits(requests_per_minute=9, tokens_per_minute=100)
        first = Reservations(bus, _of(rules), clock=lambda: 1000.0)
        second = Reservations(bus, _of(rules), clock=lambda: 1000.0)
        request = await _ask(first, "shared", tokens=100)
        assert request is not None
        assert await _ask(first, "shared", tokens=1) is None
        for _ in range(2):
            second.settle("shared", request=request, tokens=40)

        async def given_back() -> bool:
            return (await second.standings("shared")).tokens == Standing(100, 60, 24.0)

        await until(given_back)
        assert await _ask(first, "shared", tokens=60) is not None
        third = Reservations(bus, _of(rules), clock=lambda: 1000.0)
        assert await third.standings("shared") == Standings(
            Standing(9, 7, pytest.approx(2 / 9 * 60)), Standing(100, 0, 60.0)
        )

    with_bus(nats_url, run)


def test_a_node_that_remembers_an_older_account_settles_what_another_reserved(
    nats_url: str,
) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        rules = Limits(concurrent_requests=2)
        first = Reservations(bus, _of(rules), clock=lambda: 1000.0)
        second = Reservations(bus, _of(rules), clock=lambda: 1000.0)
        own = await _ask(second, "older")
        request = await _ask(first, "older")
        assert own is not None
        assert request is not None
        second.settle("older", request=request, tokens=1)

        async def is_free() -> bool:
            return await _ask(first, "older") is not None

        await until(is_free)

    with_bus(nats_url, run)


def test_a_settlement_keeps_what_others_use(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        rules = Limits(tokens_per_minute=100)
        node = Reservations(bus, _of(rules), clock=lambda: 1000.0)
        one, other = [await _ask(node, "both", tokens=50) for _ in range(2)]
        assert one is not None
        assert other is not None
        fresh = Reservations(bus, _of(rules), clock=lambda: 1000.0)
        fresh.settle("both", request=one, tokens=0)

        async def half_is_back() -> bool:
            return (await fresh.standings("both")).tokens == Standing(100, 50, 30.0)

        await until(half_is_back)

    with_bus(nats_url, run)


def test_what_ends_while_its_tenant_has_no_limits_is_open_no_more_when_it_has_again(
    nats_url: str,
) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        rules = Limits(concurrent_requests=2)
        node = Reservations(bus, lambda tenant: rules, clock=lambda: 1000.0)
        ended = [await _ask(node, "loosened") for _ in range(2)]
        rules = Limits()
        for request in ended:
            assert request is not None
            node.settle("loosened", request=request, tokens=1)
        await node.written()
        rules = Limits(concurrent_requests=2)
        assert await _ask(node, "loosened") is not None

    with_bus(nats_url, run)


def test_who_leaves_while_waiting_has_reserved_nothing(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        node = Reservations(bus, _of(Limits(concurrent_requests=1)), clock=lambda: 1000.0)
        waiting = asyncio.create_task(_ask(node, "leaver"))
        await asyncio.sleep(0)  # it has asked, and nothing is decided
        waiting.cancel()
        await asyncio.wait([waiting])

        async def fits() -> bool:
            return await _ask(node, "leaver") is not None

        await until(fits)

    with_bus(nats_url, run)


def test_a_tenant_without_limits_touches_no_account(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        node = Reservations(bus, _of(Limits()), clock=lambda: 1000.0)
        assert await _ask(node, "free") is not None
        assert await _account(bus, "free") is None

    with_bus(nats_url, run)


@pytest.mark.parametrize("open_when_away", [False, True])
def test_without_broker_the_configured_choice_is_taken(
    own_nats: NatsServer, open_when_away: bool
) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        rules = Limits(requests_per_minute=5)
        node = Reservations(bus, _of(rules), clock=lambda: 1000.0, open_when_away=open_when_away)
        own_nats.stop()

        async def away() -> bool:
            return not bus.connected

        await until(away)
        if open_when_away:
            assert await _ask(node, "away") is not None
        else:
            with pytest.raises(BrokerUnavailable):
                await _ask(node, "away")
        assert node.state == ("away: admitting" if open_when_away else "away: refusing")
        counts = (node.unlimited_passed, node.away_refused)
        assert counts == ((1, 0) if open_when_away else (0, 1))

    with_bus(own_nats.url, run)


@pytest.mark.parametrize("then", [Limits(requests_per_minute=5), Limits()])
def test_accounts_are_away_until_they_are_back_though_nobody_asks(
    own_nats: NatsServer, then: Limits
) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        rules = Limits(requests_per_minute=5)
        node = Reservations(bus, lambda tenant: rules, clock=lambda: 1000.0)
        assert node.state == "ok"
        await bus.api("STREAM.DELETE.KV_limits")
        asking = asyncio.create_task(_ask(node, "gone"))
        await asyncio.sleep(0)  # it has asked, and nothing is decided
        rules = then
        with pytest.raises(BrokerUnavailable):
            await asking
        assert node.state == "away: refusing"
        await topology.apply(bus)
        await until(lambda: node.state == "ok")
        assert await _ask(node, "gone") is not None

    with_bus(own_nats.url, run)


def test_accounts_that_can_be_read_and_not_written_are_away(own_nats: NatsServer) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        node = Reservations(bus, _of(Limits(requests_per_minute=5)), clock=lambda: 1000.0)
        assert await _ask(node, "first") is not None
        config = (await bus.api("STREAM.INFO.KV_limits"))["config"]
        await bus.api("STREAM.UPDATE.KV_limits", config | {"max_msgs": 1})
        tries: list[str] = []

        async def tried(_: Message) -> None:
            tries.append(node.state)

        await bus.subscribe("$KV.limits.second", tried)
        with pytest.raises(BrokerUnavailable):
            await _ask(node, "second")
        await until(lambda: len(tries) >= 3)
        assert set(tries[1:]) == {"away: refusing"}
        await bus.api("STREAM.UPDATE.KV_limits", config)
        await until(lambda: node.state == "ok")
        assert await _ask(node, "second") is not None

    with_bus(own_nats.url, run)


def test_who_has_heard_of_an_end_is_not_refused_before_another_node_has_settled_it(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "SETTLED_S", 10.0)  # so long that it is written by then

    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        rules = Limits(concurrent_requests=1)
        first = Reservations(bus, _of(rules), clock=lambda: 1000.0)
        second = Reservations(bus, _of(rules), clock=lambda: 1000.0)
        for _ in range(20):
            request = await _ask(first, "told")
            assert request is not None
            with pytest.raises(TooManyRequests):
                await first.check("told")
            first.ended("told", request=request)
            second.settle("told", request=request, tokens=1)
            await first.check("told")

    with_bus(nats_url, run)


def test_an_end_that_nobody_settles_holds_up_no_refusal_for_long(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        node = Reservations(bus, _of(Limits(concurrent_requests=1)), clock=lambda: 1000.0)
        request = await _ask(node, "unsettled")
        assert request is not None
        node.ended("unsettled", request=request)
        async with asyncio.timeout(30):
            assert await _ask(node, "unsettled") is None

    with_bus(nats_url, run)


def test_a_check_takes_nothing(nats_url: str) -> None:
    async def run(bus: Bus) -> None:
        await topology.apply(bus)
        node = Reservations(bus, _of(Limits(concurrent_requests=1)), clock=lambda: 1000.0)
        await node.check("checked")
        assert await _account(bus, "checked") is None
        request = await _ask(node, "checked")
        before = await versioned.read(bus, subjects.LIMITS, "checked")
        with pytest.raises(TooManyRequests):
            await node.check("checked")
        assert await versioned.read(bus, subjects.LIMITS, "checked") == before
        assert request is not None

    with_bus(nats_url, run)
