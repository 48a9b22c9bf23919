"""Limits over the whole path: what is taken, what is told, and what comes back.

Each test has a tenant of its own, since accounts remember. The model `tiny` has one slot.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.dismiss import dismiss
from schemas import subjects
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, hook, refusal
from tests.pipeline.conftest import Mode
from tests.pipeline.metered import (
    LONG,
    SOON_S,
    Drained,
    Metered,
    key_of,
    metered,
    prompt_tokens,
    ratelimit,
    until_used,
)
from tests.queue import headrace
from tests.talk import talking
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow

PER_MINUTE = 400
PROMPT = "word " * 60
RESERVED = 250
"""Output tokens that are asked for, of which few are made."""
BACK = (
    *("end", "leave", "error", "queued", "waiting", "operator", "purged", "cancelled", "expired"),
    *("socket-cancel", "socket-close", "socket-run"),
)
TERMS = {
    "free": "",
    "five": "requests_per_minute = 1\nburst = 5",  # so that none is back before all were asked for
    "five-tokens": "",  # set by the fixture: the limit is five requests' cost
    "three-open": "concurrent_requests = 3",
    "one-open": "concurrent_requests = 1",
    "sockets": "concurrent_requests = 2",
    "counts": "requests_per_minute = 3\ntokens_per_minute = 6000\nconcurrent_requests = 1",
    "told": "requests_per_minute = 1\nburst = 6\ntokens_per_minute = 6000",
    "large": "tokens_per_minute = 100",
    "twice": "tokens_per_minute = 6000",
    **{
        f"back-{name}": f"requests_per_minute = 60\ntokens_per_minute = {PER_MINUTE}"
        for name in BACK
    },
}


@pytest.fixture(scope="module")
def house(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    models = {"sim": "{}", "tiny": '{"max_num_seqs": 1}'}
    folder = tmp_path_factory.mktemp("limits")
    with metered(mode, folder, tenants=TERMS, models=models) as found:
        yield found


def statuses(answers: list[httpx.Response]) -> tuple[int, int]:
    """Return how many were accepted and how many refused, once each is looked at."""
    refused = [answer for answer in answers if answer.status_code == 429]
    for answer in refused:
        assert refusal(answer)["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1
    accepted = [answer for answer in answers if answer.status_code in (200, 303)]
    assert len(accepted) + len(refused) == len(answers), answers
    return len(accepted), len(refused)


def test_of_fifty_at_once_exactly_five_fit_a_limit_of_requests(house: Metered) -> None:
    answers = house.at_once("five", 50)
    assert statuses(answers) == (5, 45)
    assert {ratelimit(answer)["limit-requests"] for answer in answers} == {"1"}
    for answer in answers:
        if answer.status_code == 429:
            assert ratelimit(answer)["remaining-requests"] == "0"
            assert int(answer.headers["retry-after"]) <= 60


def test_of_fifty_at_once_exactly_five_fit_a_limit_of_tokens(house: Metered) -> None:
    cost = prompt_tokens(house, "Say something.") + 20
    limit = ("tenants", "set", "five-tokens", "--tokens-per-minute", str(5 * cost))
    assert headrace(house.nats_url, *limit).exit_code == 0
    doors = range(len(house.doors))

    def known() -> bool:
        heads = [house.left_of("five-tokens", door) for door in doors]
        return all(head.get("limit-tokens") == str(5 * cost) for head in heads)

    wait_for(known, within_s=10, what="the limit")
    # LONG, so that nothing of them comes back meanwhile.
    assert statuses(house.heads_at_once("five-tokens", 50, max_tokens=20, sim=LONG)) == (5, 45)


def test_a_count_of_tokens_costs_a_request_and_no_tokens(house: Metered) -> None:
    body = {"model": "sim", "input": "x"}
    with house.client("counts") as client:
        malformed = client.post("/v1/responses/input_tokens", json=body | {"input": "w " * 40_000})
        answers = [client.post("/v1/responses/input_tokens", json=body) for _ in range(4)]
    assert malformed.status_code == 400
    assert statuses(answers) == (3, 1)
    assert [ratelimit(answer)["remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    assert house.left_of("counts")["remaining-tokens"] == "6000"


def test_of_fifty_at_once_exactly_three_may_be_open(house: Metered) -> None:
    assert statuses(house.heads_at_once("three-open", 50, sim=LONG)) == (3, 47)
    wait_for(lambda: house.ask("three-open").status_code == 200, within_s=20, what="room")


def test_open_streams_and_requests_on_sockets_are_counted_together(house: Metered) -> None:
    async def run() -> None:
        headers = {"Authorization": f"Bearer {key_of('sockets')}"}
        async with talking(house.socket_end, CHAT, additional_headers=headers) as talk:
            first = await talk.begin("a", chat(sim=hook("a", "b", itl_ms=60_000)))
            await talk.chunks_came(first, 1)
            second = await talk.begin("b", chat(sim=hook("a", "b", itl_ms=60_000)))
            await talk.chunks_came(second, 1)
            third = await talk.ask("c", chat())
            assert third.error is not None
            assert third.error["code"] == "rate_limit_exceeded"
            answer = await asyncio.to_thread(house.ask, "sockets")
            assert (answer.status_code, refusal(answer)["code"]) == (429, "rate_limit_exceeded")
            await talk.cancel("a")
            await talk.ended(first)
            await until(lambda: asyncio.to_thread(accepted))
            await talk.cancel("b")
            await talk.ended(second)

    def accepted() -> bool:
        return house.ask("sockets").status_code == 200

    asyncio.run(run())


def test_every_answer_says_what_is_left(house: Metered) -> None:
    cost = prompt_tokens(house, "Say something.") + 1
    accepted = house.ask("told")
    assert accepted.status_code == 200
    told = ratelimit(accepted)
    assert (told["limit-requests"], told["remaining-requests"]) == ("1", "5")
    assert (told["limit-tokens"], told["remaining-tokens"]) == ("6000", str(6000 - cost))
    assert told["reset-requests"] == "1m0s"
    assert told["reset-tokens"].endswith("ms")
    assert set(told) == set(house.left_of("told"))

    def is_told_when_refused() -> bool:
        too_long = house.ask("told", max_tokens=10**9)
        assert too_long.status_code == 400
        return set(ratelimit(too_long)) == set(told)

    wait_for(is_told_when_refused, within_s=SOON_S, what="what is left")  # not by a slow broker
    assert house.left_of("told")["remaining-requests"] == "5"
    assert statuses(house.at_once("told", 12)) == (5, 7)
    refused = house.ask("told")
    assert ratelimit(refused)["remaining-requests"] == "0"
    assert ratelimit(house.ask("free")) == {}


def test_who_attaches_by_a_key_is_told_what_is_left(house: Metered) -> None:
    key = {"idempotency-key": secrets.token_hex(8)}
    with house.client("twice") as client:
        first, second = (client.post(CHAT, json=chat(max_tokens=1), headers=key) for _ in range(2))
    assert second.headers["x-request-id"] == first.headers["x-request-id"]
    assert ratelimit(second)["limit-tokens"] == "6000"


def test_a_request_larger_than_the_limit_is_refused_and_told_so(house: Metered) -> None:
    answer = house.ask("large", max_tokens=101)
    assert answer.status_code == 429
    assert "larger than your limit" in refusal(answer)["message"]
    assert house.left_of("large")["remaining-tokens"] == "100"


def body(model: str = "sim", **more: Any) -> dict[str, Any]:
    """Return a request that reserves much and makes little."""
    return chat(PROMPT, model=model, max_tokens=RESERVED, stream=True, **more)


def charged(house: Metered, tenant: str, began: Drained, tokens: int) -> None:
    """Check that a tenant is charged exactly so many tokens, but for what has drained."""
    used = until_used(house, tenant, tokens)
    assert used >= tokens - began.tokens


def test_what_an_ended_request_did_not_use_is_back(house: Metered) -> None:
    prompt = prompt_tokens(house, PROMPT)
    began = Drained(PER_MINUTE, time.monotonic())
    with house.client("back-end") as client:
        assert client.post(CHAT, json=body(sim=hook(*"abcde"))).status_code == 200
    charged(house, "back-end", began, prompt + 5)


def test_a_client_that_leaves_pays_for_the_prompt_and_what_was_made(house: Metered) -> None:
    prompt = prompt_tokens(house, PROMPT)
    began = Drained(PER_MINUTE, time.monotonic())
    with (
        house.client("back-leave") as client,
        client.stream(
            "POST", CHAT, json=body(sim=hook(*["a"] * 100, ttft_ms=0, itl_ms=1000))
        ) as answer,
    ):
        request = answer.headers["x-request-id"]
        chunks = answer.iter_bytes()
        next(chunks)
        assert house.used("back-leave") >= prompt + RESERVED - began.tokens
    wait_for(lambda: house.ledger(request)["aborts"] == 1, within_s=SOON_S, what="an abort")
    made = house.ledger(request)["tokens"]
    assert 1 <= made < 20
    charged(house, "back-leave", began, prompt + made)


def test_a_request_that_fails_pays_for_what_was_made(house: Metered) -> None:
    prompt = prompt_tokens(house, PROMPT)
    began = Drained(PER_MINUTE, time.monotonic())
    with house.client("back-error") as client:
        answer = client.post(CHAT, json=body(sim=hook(*"abcdefgh", fail_at=4)))
    assert b"engine_error" in answer.content
    charged(house, "back-error", began, prompt + 4)


def nothing_charged(house: Metered, tenant: str) -> None:
    until_used(house, tenant, 0)
    assert house.left_of(tenant)["remaining-requests"] == "60"


def test_leaving_while_a_request_is_queued_costs_nothing(house: Metered) -> None:
    with house.busy("tiny"), house.client("back-queued") as client:
        with client.stream("POST", CHAT, json=body("tiny")) as answer:
            assert answer.status_code == 200
            assert house.used("back-queued") > RESERVED / 2
        nothing_charged(house, "back-queued")


def test_leaving_while_a_request_waits_in_ingress_costs_nothing(house: Metered) -> None:
    with house.full("tiny") as others:
        connection = house.sent("back-waiting", body("tiny"))
        wait_for(lambda: house.waiting() == others + 1, within_s=10, what="the request to wait")
        assert house.used("back-waiting") > RESERVED / 2
        connection.close()
        wait_for(lambda: house.waiting() == others, within_s=SOON_S, what="its place to be free")
        nothing_charged(house, "back-waiting")


@pytest.mark.parametrize("leave", ["cancel", "close"])
def test_leaving_a_socket_while_its_request_waits_in_ingress_costs_nothing(
    house: Metered, leave: str
) -> None:
    tenant = f"back-socket-{leave}"

    async def run(others: int) -> None:
        headers = {"Authorization": f"Bearer {key_of(tenant)}"}
        async with talking(house.socket_end, CHAT, additional_headers=headers) as talk:
            heard = await talk.begin("a", body("tiny"))
            await until(lambda: asyncio.to_thread(lambda: house.waiting() == others + 1))
            if leave == "cancel":
                await talk.cancel("a")
                await talk.ended(heard)
                assert heard.error is not None
                assert heard.error["code"] == "request_cancelled"
        gone = lambda: house.waiting() == others  # noqa: E731
        await until(lambda: asyncio.to_thread(gone), within_s=SOON_S)

    with house.full("tiny") as others:
        asyncio.run(run(others))
        nothing_charged(house, tenant)


def test_a_cancelled_request_on_a_socket_pays_for_what_was_made(house: Metered) -> None:
    prompt = prompt_tokens(house, PROMPT)
    began = Drained(PER_MINUTE, time.monotonic())

    async def run() -> None:
        headers = {"Authorization": f"Bearer {key_of('back-socket-run')}"}
        async with talking(house.socket_end, CHAT, additional_headers=headers) as talk:
            heard = await talk.begin("a", body(sim=hook("a", "b", itl_ms=60_000)))
            await talk.chunks_came(heard, 1)
            await talk.cancel("a")
            await talk.ended(heard)

    asyncio.run(run())
    charged(house, "back-socket-run", began, prompt + 1)


def test_what_expires_in_the_queue_costs_nothing(house: Metered) -> None:
    with house.busy("tiny"), house.client("back-expired") as client:
        answer = client.post(CHAT, json=body("tiny"), headers={"x-request-timeout": "1"})
        assert b"deadline_exceeded" in answer.content
        nothing_charged(house, "back-expired")


def by_the_command(house: Metered, tenant: str, request: str) -> None:
    assert headrace(house.nats_url, "cancel", request).exit_code == 0


def by_a_purge(house: Metered, tenant: str, request: str) -> None:
    with_bus(house.nats_url, lambda bus: dismiss(bus, subjects.requests_of(tenant=tenant)))


def by_its_owner(house: Metered, tenant: str, request: str) -> None:
    with house.client(tenant) as client:
        assert client.post(f"/v1/requests/{request}/cancel").status_code == 200


@pytest.mark.parametrize(
    ("tenant", "end"),
    [
        ("back-operator", by_the_command),
        ("back-purged", by_a_purge),
        ("back-cancelled", by_its_owner),
    ],
)
def test_what_is_cancelled_in_the_queue_costs_nothing_and_later_what_was_made(
    house: Metered, tenant: str, end: Callable[[Metered, str, str], None]
) -> None:
    prompt = prompt_tokens(house, PROMPT)
    with house.busy("tiny"), house.client(tenant) as client:
        with client.stream("POST", CHAT, json=body("tiny")) as answer:
            end(house, tenant, answer.headers["x-request-id"])
            assert b"request_cancelled" in answer.read()
        nothing_charged(house, tenant)
    began = Drained(PER_MINUTE, time.monotonic())
    with (
        house.client(tenant) as client,
        client.stream("POST", CHAT, json=body(sim=hook("a", "b", itl_ms=60_000))) as answer,
    ):
        chunks = answer.iter_bytes()
        next(chunks)
        end(house, tenant, answer.headers["x-request-id"])
        assert b"request_cancelled" in b"".join(chunks)
    charged(house, tenant, began, prompt + 1)


def test_a_place_among_the_open_requests_is_free_once_its_request_has_ended(
    house: Metered,
) -> None:

    def fits() -> bool:
        with (
            house.client("one-open") as client,
            client.stream("POST", CHAT, json=chat(sim=LONG, stream=True)) as answer,
        ):
            if answer.status_code == 429:
                return False
            assert answer.status_code == 200
            assert house.ask("one-open").status_code == 429
            return True

    for _ in range(3):
        wait_for(fits, within_s=10, what="a place")
        wait_for(lambda: house.ask("one-open").status_code == 200, within_s=10, what="a place")
        wait_for(lambda: house.running("sim") == 0, within_s=10, what="rest")


def test_a_request_that_goes_on_at_another_worker_is_charged_once(
    mode: Mode, tmp_path: Path
) -> None:
    tenants = {"free": "", "back": f"requests_per_minute = 60\ntokens_per_minute = {PER_MINUTE}"}
    models = {"twin-1": "{}", "twin-2": "{}"}
    with metered(mode, tmp_path, tenants=tenants, models=models) as house:
        ask = body("twin", sim=hook(*["a"] * 40, itl_ms=150))
        began = Drained(PER_MINUTE, time.monotonic())
        with (
            house.client("back") as client,
            client.stream("POST", CHAT, json=ask) as answer,
        ):
            chunks = answer.iter_bytes()
            raw = next(chunks)
            holders: list[str] = []

            def runs() -> bool:
                holders.extend(filter(house.running, models))
                return bool(holders)

            wait_for(runs, within_s=5, what="its worker")
            house.workers[holders[0]].process.kill()
            raw += b"".join(chunks)
        assert raw.endswith(b"data: [DONE]\n\n")
        prompt = prompt_tokens(house, PROMPT, model="twin")
        charged(house, "back", began, prompt + 40)
        assert house.left_of("back")["remaining-requests"] in ("59", "60")
