"""One Idempotency-Key, one engine start: in parallel, after the end, across every door."""

import asyncio
import secrets
import time
from typing import Any

import httpx
import pytest

from headrace.bus import Bus
from headrace.kept import kept
from schemas.subjects import ReplySubject, RequestSubject, new_request_id
from schemas.wire import (
    Envelope,
    Finished,
    Piece,
    Sampling,
    Shape,
    Started,
    Usage,
    decode_frame,
    encode_envelope,
    encode_frame,
    pack_tokens,
)
from streamer.mailbox import LINGER_S
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, COMPLETIONS, chat, hook, refusal
from tests.pipeline.conftest import System
from tests.waiting import until, wait_for

PIECES = [f"{number} " for number in range(30)]


def new_key() -> dict[str, str]:
    """Headers with a key that nobody has used."""
    return {"Idempotency-Key": f"key-{secrets.token_hex(8)}"}


def story(**more: Any) -> dict[str, Any]:
    """A request of 30 tokens, 10 ms apart."""
    return chat(secrets.token_hex(4), sim=hook(*PIECES, itl_ms=10, ttft_ms=50), **more)


def ask(system: System, body: dict[str, Any], key: dict[str, str], path: str = CHAT) -> Any:
    """Post to whichever door has its turn."""
    with system.client() as client:
        return client.post(path, json=body, headers=key)


def one_start(system: System, answers: list[httpx.Response]) -> str:
    """Check that equal answers of one request, which an engine began once; return its id."""
    assert [answer.status_code for answer in answers] == [200] * len(answers), answers[-1].text
    [request] = {answer.headers["x-request-id"] for answer in answers}
    [_] = {answer.content for answer in answers}
    assert system.ledger(request)["starts"] == 1
    return request


@pytest.mark.parametrize("streamed", [True, False])
def test_ten_clients_at_once_with_one_key_get_one_run(system: System, streamed: bool) -> None:
    body, key = story(stream=streamed), new_key()

    async def ten() -> list[httpx.Response]:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(one()) for _ in range(10)]
        return [task.result() for task in asked]

    async def one() -> httpx.Response:
        async with system.async_client() as client:
            return await client.post(CHAT, json=body, headers=key)

    answers = asyncio.run(ten())
    request = one_start(system, answers)
    assert ("29 " in answers[0].text) is True
    again = ask(system, body, key)
    one_start(system, [*answers, again])
    assert system.ledger(request) == {"starts": 1, "aborts": 0, "tokens": 30}
    system.wait_at_rest()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_after_the_end_the_same_key_is_answered_from_what_is_kept(
    system: System, path: str
) -> None:
    body = story(stream=True) | {"prompt": "x"}
    key = new_key()
    first = ask(system, body, key, path)
    from_log = ask(system, body, key, path)
    request = first.headers["x-request-id"]

    async def forget(bus: Bus) -> None:
        assert await bus.purge("REPLIES", f"replies.*.*.{request}") > 0

    system.wait_at_rest()
    with_bus(system.nats_url, forget)
    from_kept = ask(system, body, key, path)
    one_start(system, [first, from_log, from_kept])
    assert first.content.endswith(b"data: [DONE]\n\n")
    with system.client() as client:
        resumed = client.get(
            f"{system.socket_end.url}/v1/streams/{request}", headers={"last-event-id": "9"}
        )
    assert first.content.endswith(resumed.content)
    assert resumed.content.startswith(b"id: 10\n")


def test_another_body_with_the_key_of_a_running_or_finished_request_is_409(
    system: System,
) -> None:
    body, key = story(stream=True), new_key()
    with system.client() as client, client.stream("POST", CHAT, json=body, headers=key) as answer:
        while_running = ask(system, body | {"seed": 5}, key)
        answer.read()
    assert ask(system, body, key).content == answer.content
    others = [
        while_running,
        ask(system, body | {"stream": False}, key),
        ask(system, body | {"prompt": "x"}, key, COMPLETIONS),
    ]
    for other in others:
        assert other.status_code == 409
        assert refusal(other) == {
            "message": "This 'Idempotency-Key' belongs to a request with another body.",
            "type": "idempotency_error",
            "param": "Idempotency-Key",
            "code": "idempotency_conflict",
        }
    assert system.ledger(answer.headers["x-request-id"])["starts"] == 1


def test_a_refused_request_gives_its_key_back(system: System) -> None:
    key = new_key()
    assert ask(system, chat(model="nobody"), key).status_code == 404
    assert ask(system, chat(temperature=-1), key).status_code == 400
    assert ask(system, chat(max_tokens=10**9), key).status_code == 400
    answer = ask(system, story(), key)
    one_start(system, [answer])


def test_a_failed_request_gives_its_key_back(system: System) -> None:
    key = new_key()
    failing = chat(sim=hook("a", "b", fail_at=1))
    first = ask(system, failing, key)
    system.wait_at_rest()  # a client may hear of an end a moment before the log has it
    second = ask(system, failing, key)
    system.wait_at_rest()
    assert first.status_code == second.status_code == 500
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    one_start(system, [ask(system, story(), key)])


@pytest.mark.parametrize("model", ["sim", "tiny"])
def test_a_cancelled_request_gives_its_key_back(system: System, model: str) -> None:
    key = new_key()
    slow = chat(model=model, stream=True, sim=hook("a", ttft_ms=60_000))
    with (
        system.client() as client,
        client.stream("POST", CHAT, json=slow, headers=new_key()) as before,  # fills `tiny`
        client.stream("POST", CHAT, json=slow, headers=key) as answer,
    ):
        for each in (answer, before):
            request = each.headers["x-request-id"]
            said = client.post(f"{system.doors[0].url}/v1/requests/{request}/cancel")
            assert said.json()["status"] == "cancelled"
        assert '"request_cancelled"' in answer.read().decode()
    again = ask(system, chat(model=model, sim=hook("b")), key)
    one_start(system, [again])
    system.wait_at_rest()


def test_a_client_that_left_for_good_gives_its_key_back(system: System) -> None:
    key = new_key()
    slow = chat(stream=True, sim=hook("a", ttft_ms=60_000))
    with system.client() as client, client.stream("POST", CHAT, json=slow, headers=key) as answer:
        request = answer.headers["x-request-id"]
        wait_for(lambda: system.ledger(request)["starts"] == 1, within_s=15, what="a start")
    wait_for(lambda: system.ledger(request)["aborts"] == 1, within_s=15, what="an abort")
    again = ask(system, chat(sim=hook("b")), key)
    assert again.headers["x-request-id"] != request
    one_start(system, [again])


def test_a_client_that_comes_back_at_once_goes_on_with_its_request(system: System) -> None:
    for _ in range(20):  # on a machine that stalls, at once may be too late
        body, key = story(stream=True), new_key()
        with (
            system.client() as one,
            system.client() as two,
            one.stream("POST", CHAT, json=body, headers=key) as answer,
        ):
            request = answer.headers["x-request-id"]
            parts = answer.iter_raw()  # held: its end would be the client's leaving
            next(parts)
            left_s = time.monotonic()
            answer.close()
            with two.stream("POST", CHAT, json=body, headers=key) as again:
                in_time = time.monotonic() - left_s < LINGER_S
                content = again.read()
        if in_time:
            break
    assert again.headers["x-request-id"] == request
    assert content.endswith(b"data: [DONE]\n\n")
    assert content.count(b"\nid: ") == 30
    assert system.ledger(request) == {"starts": 1, "aborts": 0, "tokens": 30}


@pytest.mark.slow
@pytest.mark.parametrize("first_leaves", [True, False])
def test_one_reader_of_two_may_leave_and_the_last_ones_leaving_cancels(
    system: System, first_leaves: bool
) -> None:
    pieces = [f"{number} " for number in range(4000)]
    body, key = chat(stream=True, sim=hook(*pieces, itl_ms=20, ttft_ms=0)), new_key()
    with system.client() as one, system.client() as two:
        first = one.send(one.build_request("POST", CHAT, json=body, headers=key), stream=True)
        lines = first.iter_raw()
        next(lines)
        second = two.send(two.build_request("POST", CHAT, json=body, headers=key), stream=True)
        request = second.headers["x-request-id"]
        assert request == first.headers["x-request-id"]
        leaves, stays = (first, second) if first_leaves else (second, first)
        rest = lines if stays is first else second.iter_raw()
        next(rest)
        leaves.close()
        made = system.ledger(request)["tokens"]
        seen = 0
        for part in rest:  # for twice as long as the one that left might have come back
            seen += part.count(b"id: ")
            if seen > made + 60:
                break
        assert system.ledger(request)["aborts"] == 0
        stays.close()
    wait_for(lambda: system.ledger(request)["aborts"] == 1, within_s=15, what="an abort")
    assert system.ledger(request)["starts"] == 1
    system.wait_at_rest()


@pytest.mark.parametrize("key", ["", "a b", "a\tb", "é", "x" * 256])
def test_a_key_that_is_none_is_400(system: System, key: str) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(), headers={"Idempotency-Key": key.encode("latin-1")})
    assert answer.status_code == 400
    assert refusal(answer)["param"] == "Idempotency-Key"


def test_two_keys_are_400_and_the_longest_and_oddest_are_taken(system: System) -> None:
    with system.client() as client:
        twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
        assert client.post(CHAT, json=chat(), headers=twice).status_code == 400
        odd = "".join(chr(code) for code in range(0x21, 0x7F))
        for key in (secrets.token_hex(8) + odd, secrets.token_hex(16) + "x" * 223):
            answer = client.post(CHAT, json=chat(max_tokens=1), headers={"Idempotency-Key": key})
            assert answer.status_code == 200


def test_a_key_is_in_no_log_and_not_on_the_broker(system: System) -> None:
    key = new_key()
    body = story()
    ask(system, body, key)
    ask(system, body, key)
    ask(system, chat("another"), key)
    logs = "".join(node.process.said() for node in system.nodes)
    assert key["Idempotency-Key"] not in logs

    async def search(bus: Bus) -> bool:
        info = await bus.api("STREAM.INFO.KV_responses", {"subjects_filter": ">"})
        return any(key["Idempotency-Key"] in subject for subject in info["state"]["subjects"])

    assert with_bus(system.nats_url, search) is False


def test_only_answers_of_requests_with_a_key_are_kept(system: System) -> None:
    without = ask(system, chat(max_tokens=2), {})
    with_key = ask(system, chat(max_tokens=2), new_key())
    system.wait_at_rest()

    async def found(bus: Bus) -> list[bool]:
        requests = [each.headers["x-request-id"] for each in (without, with_key)]
        return [await kept(bus, tenant="default", request=r) is not None for r in requests]

    assert with_bus(system.nats_url, found) == [False, True]


def test_a_waiting_requests_deadline_ends_those_who_were_attached_too(system: System) -> None:
    busy = chat(model="tiny", stream=True, sim=hook("a", ttft_ms=60_000))
    waits = chat(model="tiny", sim=hook("never"))
    key = new_key() | {"x-request-timeout": "1"}

    async def two() -> list[httpx.Response]:
        async with system.async_client() as client:
            return await asyncio.gather(
                *(client.post(CHAT, json=waits, headers=key) for _ in range(2))
            )

    with system.client() as client, client.stream("POST", CHAT, json=busy) as running:
        request = running.headers["x-request-id"]
        wait_for(lambda: system.ledger(request)["starts"] == 1, within_s=15, what="a start")
        answers = asyncio.run(two())
    assert [refusal(answer)["code"] for answer in answers] == ["deadline_exceeded"] * 2
    system.wait_at_rest()


def test_an_answer_that_ended_before_its_worker_could_keep_it_is_kept_by_the_next(
    system: System,
) -> None:
    """As after a worker's death between its last frame and its acknowledgement."""
    request = new_request_id()
    subject = RequestSubject("online", "sim", 3, "default", request)
    shape = Shape("chat", "sim", 5, False, 1, False)
    envelope = Envelope(
        request=request,
        tenant="default",
        model="sim",
        reply=str(ReplySubject("gone", "default", request)),
        prompt=pack_tokens([1]),
        sampling=Sampling(max_tokens=1),
        shape=shape,
        deadline_s=time.time() + 60,
        keep_answer=True,
    )

    async def lost(bus: Bus) -> None:
        claim = await bus.store(envelope.reply, encode_frame(Started(0, "dead", 0, shape)))
        end = Finished(claim.seq, 0, (Piece(0, "x", (7,)),), ("stop",), Usage(1, 1, 0), {})
        await bus.store(envelope.reply, encode_frame(end))
        await bus.store(str(subject), encode_envelope(envelope))
        found = await until(lambda: kept(bus, tenant="default", request=request))
        assert decode_frame(found[-1]) == end._replace(seq=1, pieces=())

    with_bus(system.nats_url, lost)
    system.wait_at_rest()
