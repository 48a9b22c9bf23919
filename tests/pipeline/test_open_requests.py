"""A tenant's open requests: each counts once, from its acceptance to its end, whoever reads it."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.pipeline.asking import CHAT, chat, hook, refusal
from tests.pipeline.conftest import Mode
from tests.pipeline.metered import LONG, Metered, exchange, key_of, metered
from tests.talk import talking
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow

RESPONSES = "/v1/responses"
STALLED = hook("a", "b", itl_ms=60_000, ttft_ms=0)
NAMES = ("sse", "whole", "socket", "background", "unfollowed", "attached", "resumed")
TERMS = {"free": "", **dict.fromkeys(NAMES, "concurrent_requests = 1")}


@pytest.fixture(scope="module")
def house(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    folder = tmp_path_factory.mktemp("open")
    with metered(mode, folder, tenants=TERMS, models={"sim": "{}"}) as found:
        yield found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def full(house: Metered, tenant: str) -> bool:
    """Tell whether a tenant may open no further request, at any door."""
    answers = [house.ask(tenant, door) for door in range(len(house.doors))]
    for answer in answers:
        assert answer.status_code == 429, answer.text
        assert refusal(answer)["code"] == "rate_limit_exceeded"
    return True


def free(house: Metered, tenant: str) -> bool:
    """Tell whether a tenant may open a request; that one has ended."""
    return house.ask(tenant).status_code == 200


def wait_free(house: Metered, tenant: str) -> None:
    wait_for(lambda: free(house, tenant), within_s=15, what="a place")


def begun(stack: ExitStack, client: httpx.Client, method: str, path: str, **more: Any) -> Any:
    """Open a stream, and return its answer and the chunks to come; the first one is read."""
    answer = stack.enter_context(client.stream(method, path, **more))
    assert answer.status_code == 200, answer.read()
    chunks = answer.iter_bytes()
    next(chunks)
    return answer, chunks


def test_a_stream_counts_to_its_end(house: Metered, stack: ExitStack) -> None:
    client = stack.enter_context(house.client("sse"))
    body = chat(stream=True, sim=hook("a", "b", itl_ms=12_000, ttft_ms=0))
    _, chunks = begun(stack, client, "POST", CHAT, json=body)
    assert full(house, "sse")
    assert b"".join(chunks).endswith(b"[DONE]\n\n")
    wait_free(house, "sse")


def test_an_answer_that_is_not_streamed_counts_to_its_end(house: Metered) -> None:
    async def run() -> None:
        asking = asyncio.create_task(exchange(house.doors[0].url, "whole", chat(sim=LONG)))
        await until(lambda: house.running("sim") == 1)
        assert await asyncio.to_thread(full, house, "whole")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    wait_for(lambda: house.running("sim") == 0, within_s=15, what="the end of all before")
    asyncio.run(run())
    wait_free(house, "whole")


def test_a_request_on_a_socket_counts_to_its_end_and_an_idle_socket_does_not(
    house: Metered,
) -> None:
    async def run() -> None:
        headers = {"Authorization": f"Bearer {key_of('socket')}"}
        async with talking(house.socket_end, CHAT, additional_headers=headers) as talk:
            heard = await talk.begin("a", chat(sim=STALLED))
            await talk.chunks_came(heard, 1)
            assert await asyncio.to_thread(full, house, "socket")
            await talk.cancel("a")
            await talk.ended(heard)
            await until(lambda: asyncio.to_thread(free, house, "socket"))

    asyncio.run(run())


def test_a_response_in_the_background_counts_although_nobody_reads_it(house: Metered) -> None:
    body = {"model": "sim", "input": "x", "background": True, "sim": STALLED}
    with house.client("background") as client:
        made = client.post(RESPONSES, json=body).json()
        assert made["status"] in ("queued", "in_progress")
        assert full(house, "background")
        assert client.post(f"{RESPONSES}/{made['id']}/cancel").status_code == 200
    wait_free(house, "background")


@pytest.mark.parametrize("mode", ["split"], indirect=True, scope="session")
def test_a_request_whose_redirect_nobody_follows_counts_until_it_is_cancelled(
    house: Metered,
) -> None:
    [answer] = house.at_once("unfollowed", 1, stream=True, sim=LONG)
    assert answer.status_code == 303
    assert full(house, "unfollowed")
    wait_for(lambda: free(house, "unfollowed"), within_s=20, what="its cancellation")


def test_a_reader_that_attaches_by_key_counts_for_nothing(house: Metered, stack: ExitStack) -> None:
    client = stack.enter_context(house.client("attached"))
    body = chat(stream=True, sim=STALLED)
    more = {"json": body, "headers": {"idempotency-key": secrets.token_hex(8)}}
    first, *reading = begun(stack, client, "POST", CHAT, **more)
    with ExitStack() as readers:
        for _ in range(3):
            # Who drops the chunks to come has left.
            other, chunks = begun(readers, client, "POST", CHAT, **more)
            reading.append(chunks)
            assert other.headers["x-request-id"] == first.headers["x-request-id"]
        assert full(house, "attached")
    assert full(house, "attached")  # their leaving ends nothing
    stack.close()
    wait_free(house, "attached")


def test_a_stream_that_is_resumed_counts_once_and_to_its_end(
    house: Metered, stack: ExitStack
) -> None:
    client = stack.enter_context(house.client("resumed"))
    reader = ExitStack()
    body = chat(stream=True, on_disconnect="continue", sim=STALLED)
    first, _ = begun(reader, client, "POST", CHAT, json=body)
    request = first.headers["x-request-id"]
    path = f"{_end(house, first)}/v1/streams/{request}"
    reading = [begun(stack, client, "GET", path) for _ in range(2)]
    reader.close()
    assert full(house, "resumed")
    assert len(reading) == 2  # they have read until now
    stack.close()
    assert full(house, "resumed")  # it continues without a reader
    with house.client("resumed") as canceller:
        assert canceller.post(f"/v1/requests/{request}/cancel").status_code == 200
    wait_free(house, "resumed")


def _end(house: Metered, answer: httpx.Response) -> str:
    """Return where an answer's stream came from."""
    return f"{answer.url.scheme}://{answer.url.netloc.decode()}"
