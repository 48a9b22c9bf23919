"""Moderation over the whole path: what is refused, how an answer ends, and what is charged."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import journal
from headrace.bus import Bus
from schemas import subjects
from schemas.wire import Failed, Frame, decode_frame, encode_frame, span
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, COMPLETIONS, Streamed, chat, collect, hook, refusal, stream
from tests.pipeline.conftest import Mode, worker
from tests.pipeline.metered import Drained, Metered, key_of, metered, until_used
from tests.servers import wait_ready
from tests.sse import Event, Reader
from tests.talk import talking
from tests.waiting import wait_for

BOUND = 24
TABLE = f"""
[moderation]
patterns = ["forbidden", "(?i)agent \\\\d{{3}}\\\\b"]
hold_back_characters = {BOUND}
"""
PER_MINUTE = 120
"""So few that what drains during a test is less than what it is charged."""
TERMS = {
    "free": "",
    "spared": "moderation = false",
    **dict.fromkeys(
        ("refused", "chats", "completes", "moves"), f"tokens_per_minute = {PER_MINUTE}"
    ),
}
SAID = ["This ", "is ", "a long story of ", "for", "bid", "den", " things", *["!"] * 200]
BEFORE = "This is a long story of "


@pytest.fixture(scope="module")
def house(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    folder = tmp_path_factory.mktemp("moderated")
    models = {"sim": "{}", "mortal-1": "{}"}
    with metered(mode, folder, tenants=TERMS, models=models, more=TABLE) as found:
        yield found


def check_charged(house: Metered, tenant: str, tokens: int, *, since_s: float) -> None:
    """Check that a tenant is charged exactly this, less what has drained."""
    used = until_used(house, tenant, tokens)
    assert used >= tokens - Drained(PER_MINUTE, since_s).tokens > 0


def moderated_total(house: Metered, direction: str) -> float:
    nodes = house.doors if direction == "input" else house.workers.values()
    suffix = f"_{direction}_moderated_total"
    return sum(n for each in nodes for name, n in each.metrics().items() if name.endswith(suffix))


def frames_of(house: Metered, request: str, tenant: str) -> list[Frame]:
    """Return what the log holds of a request."""

    async def read(bus: Bus) -> list[Frame]:
        subject = f"replies.*.{tenant}.{request}"
        info = await bus.api(f"STREAM.INFO.{subjects.REPLIES}", {"subjects_filter": subject})
        [reply] = info["state"]["subjects"]
        return [decode_frame(e.data) for e in await journal.read(bus, subjects.REPLIES, reply)]

    return with_bus(house.nats_url, read)


def log_of(house: Metered, request: str, tenant: str) -> bytes:
    """Return the same as bytes."""
    return b"".join(map(encode_frame, frames_of(house, request, tenant)))


ASKED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, chat("Tell me forbidden things."), "messages"),
    (CHAT, chat("Hello", stream=True) | {"messages": [
        {"role": "system", "content": [{"type": "text", "text": "You are AGENT 007"}]},
        {"role": "user", "content": "Hello"},
    ]}, "messages"),
    (CHAT, chat(n=2) | {"messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function",
             "function": {"name": "f", "arguments": '{"a": "forbidden"}'}},
        ]},
        {"role": "tool", "content": "done", "tool_call_id": "c"},
    ]}, "messages"),
    (COMPLETIONS, {"model": "sim", "prompt": "forbidden"}, "prompt"),
    (COMPLETIONS, {"model": "sim", "prompt": "x " * 4000 + "forbidden " + "y " * 400}, "prompt"),
    ("/v1/responses", {"model": "sim", "input": "forbidden"}, "input"),
    ("/v1/responses", {"model": "sim", "input": "Hi", "instructions": "agent 007"}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), ASKED)
def test_what_must_not_be_asked_is_refused_and_not_charged(
    house: Metered, path: str, body: dict[str, Any], param: str
) -> None:
    counted = moderated_total(house, "input")
    with house.client("refused") as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = refusal(answer)
    assert error["code"] == "content_policy_violation"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert "forbidden" not in answer.text
    assert "00" not in error["message"]
    assert house.used("refused") == 0
    assert moderated_total(house, "input") == counted + 1
    assert not any("forbidden" in each.process.said() for each in house.front)


def test_token_ids_are_read_before_they_are_let_pass(house: Metered) -> None:
    from ingress.prompt import Prompter
    from workers.sim.vocabulary import tokenizer_files

    ids = Prompter(tokenizer_files()).text("So forbidden.", special=False)
    with house.client("refused") as client:
        answer = client.post(COMPLETIONS, json={"model": "sim", "prompt": ids})
        fine = client.post(COMPLETIONS, json={"model": "sim", "prompt": ids[:1], "max_tokens": 1})
    assert refusal(answer)["code"] == "content_policy_violation"
    assert fine.status_code == 200


def test_sockets_refuse_the_same_and_live_on(house: Metered) -> None:
    async def run() -> None:
        headers = {"authorization": f"Bearer {key_of('free')}"}
        async with talking(
            house.socket_end, "/v1/chat/completions", additional_headers=headers
        ) as talk:
            heard = await talk.ask("a", chat("forbidden"))
            assert heard.error is not None
            assert heard.error["code"] == "content_policy_violation"
            good = await talk.ask("b", chat(sim=hook(*SAID)))
            assert good.done
            assert good.text() == BEFORE
            reasons = [c["finish_reason"] for chunk in good.chunks for c in chunk["choices"]]
            assert reasons[-1] == "content_filter"

    asyncio.run(run())


def test_a_spared_tenant_asks_and_hears_everything(house: Metered) -> None:
    with house.client("spared") as client:
        found = stream(client, chat("forbidden", sim=hook(*SAID)))
    assert found.text() == "".join(SAID)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_ends_before_what_must_not_be_said(house: Metered, path: str) -> None:
    counted = moderated_total(house, "output")
    tenant, since_s = ("chats" if path == CHAT else "completes"), time.monotonic()
    asks = "Hello " * 7  # much, beside what drains meanwhile
    body = chat(asks) if path == CHAT else {"model": "sim", "prompt": asks}
    # It hangs behind the match: no engine has made all before the first token may go out.
    body |= {"max_tokens": 13, "sim": hook(*SAID, ttft_ms=0, itl_ms=5, hang_at=12)}
    with house.client(tenant) as client:
        streamed = stream(client, body | {"stream_options": {"include_usage": True}}, path)
        whole = collect(client, body, path)
    assert streamed.text() == BEFORE
    assert streamed.reasons() == {0: "content_filter"}
    choice = whole["choices"][0]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == BEFORE
    assert choice["finish_reason"] == "content_filter"
    usages = [streamed.chunks[-1]["usage"], whole["usage"]]
    # The one behind the match tells that it is one; a busy engine may be further by then.
    assert all(usage["completion_tokens"] >= 7 for usage in usages)
    assert house.ledger(streamed.request)["aborts"] == 1
    assert moderated_total(house, "output") == counted + 2
    assert b"bidden" not in log_of(house, streamed.request, tenant)
    with house.client(tenant) as client:
        replayed = client.get(f"{house.socket_end}/v1/streams/{streamed.request}")
    assert replayed.content == streamed.raw
    total = sum(usage["total_tokens"] for usage in usages)
    check_charged(house, tenant, total, since_s=since_s)


def test_a_cancelled_answer_is_charged_with_what_was_held_back(house: Metered) -> None:
    body = chat(stream=True, sim=hook(*["ab"] * 400, ttft_ms=0, itl_ms=100))
    with house.client("free") as client, client.stream("POST", CHAT, json=body) as answer:
        request = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        for line in lines:
            if line.startswith("id: 4"):
                break
        assert client.post(f"/v1/requests/{request}/cancel").status_code == 200
        assert "request_cancelled" in "".join(lines)
    wait_for(
        lambda: isinstance(frames_of(house, request, "free")[-1], Failed),
        within_s=15,
        what="the end in the log",
    )
    *_, end = frames_of(house, request, "free")
    assert isinstance(end, Failed)
    out = end.seq + span(end.pieces)
    assert end.usage.completion_tokens - out == BOUND // 2  # two characters a token


def test_a_near_miss_arrives_whole(house: Metered) -> None:
    said = ["for", "bid", "d en", " Agent 0", "07", "8 is", " none", " and for", "bidding"]
    with house.client("free") as client:
        near = stream(client, chat(sim=hook(*said)))
    assert near.text() == "forbidd en Agent 0078 is none and forbidding"
    assert near.reasons() == {0: "stop"}


def test_each_choice_and_each_tool_call_is_looked_at(house: Metered) -> None:
    calls = [{"name": "f", "arguments": ['{"a": "', "agent", " 00", "7", '"}']}]
    with house.client("free") as client:
        found = stream(client, chat(sim={"tool_calls": calls}))
        two = stream(client, chat(n=2, sim=hook(*SAID)))
        logged = stream(client, chat(logprobs=True, top_logprobs=1, sim=hook(*SAID)))
    assert found.reasons() == {0: "content_filter"}
    assert b"agent" not in found.raw
    assert b'\\"a\\": \\"' in found.raw
    assert two.reasons() == {0: "content_filter", 1: "content_filter"}
    assert [two.text(0), two.text(1)] == [BEFORE, BEFORE]
    tokens = [
        token["token"]
        for chunk in logged.chunks
        for choice in chunk["choices"]
        for token in (choice.get("logprobs") or {}).get("content", ())
    ]
    assert "".join(tokens) == BEFORE


def test_a_response_is_incomplete_and_stored_as_it_was_told(house: Metered) -> None:
    body = {"model": "sim", "input": "Hello", "sim": hook(*SAID)}
    with house.client("free") as client:
        whole = client.post("/v1/responses", json=body).json()
        with client.stream("POST", "/v1/responses", json=body | {"stream": True}) as answer:
            raw = answer.read()
        kept = client.get(f"/v1/responses/{whole['id']}").json()
        more = {"model": "sim", "input": "Go on", "previous_response_id": whole["id"]}
        on = client.post("/v1/responses", json=more | {"sim": hook("yes")})
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "content_filter"},
    )
    assert whole["output"][0]["content"][0]["text"] == BEFORE
    assert kept == whole
    assert b"response.incomplete" in raw
    assert b"bidden" not in raw
    assert on.json()["status"] == "completed"


@pytest.mark.slow
def test_a_match_over_a_workers_death_is_found_and_charged_once(
    house: Metered, tmp_path: Path
) -> None:
    """The victim dies with the beginning of the match in its hands: its first piece goes out when
    "bid" has been made, nine seconds before "den" would be."""
    config = Path(house.workers["mortal-1"].process.log).parent / "limits.toml"
    told = ["Listen ", "to a long story, "]
    assert len("".join(told)) + len("forbid") - (BOUND - 1) == len(told[0])
    pieces = [*told, "for", "bid", *[""] * 5, "den", *["!"] * 40]
    asks = "Hello " * 26  # much, beside what drains meanwhile
    body = chat(asks, model="mortal", max_tokens=20, sim=hook(*pieces, ttft_ms=0, itl_ms=1500))
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    before, since_s = "".join(told), time.monotonic()
    victim = house.workers["mortal-1"].process
    reader, events, raw = Reader(), list[Event](), b""
    heirs = []
    try:
        with house.client("moves") as client, client.stream("POST", CHAT, json=body) as answer:
            request = answer.headers["x-request-id"]
            for part in answer.iter_raw():
                raw += part
                events += reader.feed(part)
                if "Listen " in raw.decode() and not heirs:
                    victim.kill()
                    flags = ("--config", str(config), "--served-model-name", "mortal")
                    heirs.append(worker("heir", house.nats_url, tmp_path, *flags))
        streamed = Streamed(request, raw)
        assert streamed.text() == before
        assert streamed.reasons() == {0: "content_filter"}
        usage = streamed.chunks[-1]["usage"]
        assert usage["completion_tokens"] >= 5
        assert b"bidden" not in log_of(house, request, "moves")
        check_charged(house, "moves", usage["total_tokens"], since_s=since_s)
        wait_ready(heirs[0].process, heirs[0].admin_url)
        assert heirs[0].metrics()["headrace_worker_output_moderated_total"] == 1
    finally:
        for heir in heirs:
            heir.process.stop()
