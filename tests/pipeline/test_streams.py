"""The bytes of a stream, against real processes: text, events, errors, and the official SDK."""

import asyncio
import json
import re
import time
from typing import Any

import httpx
import openai
import pytest

from tests.pipeline.asking import CHAT, COMPLETIONS, chat, collect, hook, refusal, stream
from tests.pipeline.conftest import System
from tests.sse import Reader, events_of
from tests.waiting import wait_for

STALL_S = 3.0
"""How long a busy machine may keep from a client what was sent to it in time."""
PROMPTS = [
    f"{number}: {text}"
    for number in range(10)
    for text in ("Name a river.", "¿Qué?", "日本語で。", "a" * 700, "Two\n\nlines\tand a tab 🙂")
]


@pytest.fixture
def sdk(system: System) -> Any:
    with openai.OpenAI(
        base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        yield client


def test_the_official_sdk_collects_a_chat_answer(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "Hello"}], max_tokens=12
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_the_official_sdk_streams_what_it_collects(sdk: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello again"}]
    whole = sdk.chat.completions.create(model="sim", messages=messages, seed=3)
    with sdk.chat.completions.create(model="sim", messages=messages, seed=3, stream=True) as parts:
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content


def test_the_official_sdk_streams_a_completion(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(model="sim", prompt="Once", max_tokens=20)
    with sdk.completions.create(model="sim", prompt="Once", max_tokens=20, stream=True) as parts:
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_the_official_sdk_lists_the_models(sdk: openai.OpenAI) -> None:
    models = {model.id: model for model in sdk.models.list()}
    assert {"sim", "tiny"} <= set(models)
    assert (models["sim"].model_extra or {})["max_model_len"] == 32768


def test_the_official_sdk_raises_on_an_error_in_the_middle(sdk: openai.OpenAI) -> None:
    body = {"sim": hook("a", "b", "c", "d", "e", "f", fail_at=5)}
    with sdk.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "x"}], stream=True, extra_body=body
    ) as parts:
        seen = []
        with pytest.raises(openai.APIError):
            seen.extend(part.choices[0] for part in parts)
    assert "".join(choice.delta.content or "" for choice in seen) == "abcde"
    assert all(choice.finish_reason is None for choice in seen)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_text_equals_unstreamed_text_for_50_prompts(system: System, path: str) -> None:
    async def both(client: httpx.AsyncClient, prompt: str) -> tuple[str, str]:
        body: dict[str, Any] = {"model": "sim", "seed": 7, "max_tokens": 60}
        body |= chat(prompt) if path == CHAT else {"prompt": prompt}
        whole, parts = await asyncio.gather(
            client.post(path, json=body), client.post(path, json=body | {"stream": True})
        )
        choice = whole.json()["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        shown = ""
        for event in events_of(parts.content)[:-1]:
            part = event.json["choices"][0]
            shown += part["delta"].get("content") or "" if path == CHAT else part["text"]
        return text, shown

    async def all_of_them() -> list[tuple[str, str]]:
        async with system.async_client() as client:
            return await asyncio.gather(*(both(client, prompt) for prompt in PROMPTS))

    pairs = asyncio.run(all_of_them())
    assert len(pairs) == 50
    assert [shown for _, shown in pairs] == [text for text, _ in pairs]
    assert len({text for text, _ in pairs}) == 50


def test_an_error_at_token_5_is_one_event_without_id_and_without_done(system: System) -> None:
    with system.client() as client:
        parts = stream(client, chat(sim=hook(*"abcdefgh", fail_at=5)))
    *shown, error = parts.events
    assert parts.text() == "abcde"
    assert parts.reasons() == {}
    assert [event.id for event in shown] == ["0", "1", "2", "3", "4"]
    assert error.id is None
    assert error.data.startswith('{"error":')
    assert error.json["error"]["code"] == "engine_error"
    assert b"[DONE]" not in parts.raw


def test_an_error_before_the_first_token_is_a_500_when_not_streamed(system: System) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat(sim=hook("a", fail_at=0)))
    assert answer.status_code == 500
    assert refusal(answer)["code"] == "engine_error"


def test_what_the_engine_refuses_is_one_error_event_without_done(system: System) -> None:
    with system.client() as client:
        parts = stream(client, chat(sim=hook("a", {"hex": "no hex"})))
    [error] = parts.events
    assert error.json["error"]["code"] == "invalid_request"
    assert b"[DONE]" not in parts.raw


def test_headers_come_before_the_first_token(system: System) -> None:
    body = chat(stream=True, sim=hook("late", ttft_ms=600_000))
    with system.client() as client, client.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200
        request = answer.headers["x-request-id"]
        wait_for(lambda: system.ledger(request)["starts"] == 1, within_s=15, what="its start")
        assert system.ledger(request)["tokens"] == 0
    system.wait_at_rest()


@pytest.mark.slow
def test_a_comment_comes_within_15_s_of_quiet_before_and_between_tokens(system: System) -> None:
    # Tokens that make no event are quiet too; and 15 s are five times the broker's ack_wait.
    held = ("a", {"hex": "f09f"}, *[""] * 22, {"hex": "9880"})
    hooks = [hook("a", ttft_ms=23_000), hook("a", "b", ttft_ms=0, itl_ms=23_000)]
    hooks.append(hook(*held, ttft_ms=0, itl_ms=1000))

    async def quiet(client: httpx.AsyncClient, sim: dict[str, Any]) -> tuple[float, Reader, str]:
        reader, spoke_s, longest_s = Reader(), time.monotonic(), 0.0
        async with client.stream("POST", CHAT, json=chat(stream=True, sim=sim)) as answer:
            async for part in answer.aiter_raw():
                longest_s = max(longest_s, time.monotonic() - spoke_s)
                spoke_s = time.monotonic()
                reader.feed(part)
        return longest_s, reader, answer.headers["x-request-id"]

    async def all_of_them() -> list[tuple[float, Reader, str]]:
        async with system.async_client() as client:
            return await asyncio.gather(*(quiet(client, sim) for sim in hooks))

    for longest_s, reader, request in asyncio.run(all_of_them()):
        assert longest_s <= 15.0 + STALL_S
        assert len(reader.comments) >= 1
        assert system.ledger(request)["starts"] == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_tokens_that_look_like_events_arrive_whole_byte_by_byte(system: System, path: str) -> None:
    pieces = [
        "\n\n",
        "data: x",
        "\r\n",
        "\r",
        "id: 7",
        "\n\ndata: [DONE]\n\n",
        "\u2028",
        "\x00\x1b",
    ]
    body = chat("x") if path == CHAT else {"model": "sim", "prompt": "x"}
    with system.client() as client:
        parts = stream(client, body | {"sim": hook(*pieces)}, path)
    reader = Reader()
    bytewise = [event for byte in parts.raw for event in reader.feed(bytes([byte]))]
    assert bytewise == parts.events
    assert len(parts.events) == len(pieces) + 2
    assert parts.text() == "".join(pieces)


def test_done_comes_once_and_last_after_the_usage_chunk(system: System) -> None:
    body = chat(sim=hook("a", "b"), stream_options={"include_usage": True})
    with system.client() as client:
        parts = stream(client, body)
    assert parts.raw.count(b"data: [DONE]") == 1
    assert parts.events[-1].data == "[DONE]"
    usage = parts.events[-2].json
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in parts.chunks[:-1])


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_without_include_usage_no_chunk_speaks_of_usage(
    system: System, options: dict[str, Any] | None
) -> None:
    with system.client() as client:
        parts = stream(client, chat(sim=hook("a", "b"), stream_options=options))
    assert all("usage" not in chunk for chunk in parts.chunks)
    assert all(chunk["choices"] for chunk in parts.chunks)


def test_a_refused_stream_is_a_4xx_with_json(system: System) -> None:
    with system.client() as client:
        unknown = client.post(CHAT, json=chat(model="none", stream=True))
        long = client.post(CHAT, json=chat("word " * 40_000, stream=True))
        bad = client.post(CHAT, json=chat(stream=True, temperature=9))
    assert (unknown.status_code, refusal(unknown)["code"]) == (404, "model_not_found")
    assert (long.status_code, refusal(long)["code"]) == (400, "context_length_exceeded")
    assert (bad.status_code, refusal(bad)["param"]) == (400, "temperature")


def test_event_ids_rise_and_are_unique(system: System) -> None:
    body = chat(max_tokens=40, ignore_eos=True, stream_options={"include_usage": True})
    with system.client() as client:
        parts = stream(client, body)
    ids = [int(event.id) for event in parts.events if event.id is not None]
    assert ids == sorted(set(ids))
    assert len(ids) == 42
    assert parts.events[-1].id is None


def test_a_stream_without_event_ids_is_data_lines_alone(system: System) -> None:
    options = {"include_usage": True, "include_event_ids": False}
    with system.client() as client:
        parts = stream(client, chat(sim=hook("a", "b"), stream_options=options))
    assert parts.text() == "ab"
    lines = [line for line in parts.raw.splitlines() if line]
    assert len(lines) == 5
    assert all(line.startswith(b"data: ") for line in lines)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_three_choices_have_their_index_and_reason_in_both_modes(system: System, path: str) -> None:
    body: dict[str, Any] = chat("three") if path == CHAT else {"model": "sim", "prompt": "three"}
    body |= {"n": 3, "max_tokens": 9, "ignore_eos": True, "seed": 1}
    with system.client() as client:
        whole = collect(client, body, path)
        parts = stream(client, body, path)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 3
    assert parts.reasons() == {0: "length", 1: "length", 2: "length"}
    texts = [
        choice["message"]["content"] if path == CHAT else choice["text"]
        for choice in whole["choices"]
    ]
    assert [parts.text(index) for index in range(3)] == texts
    assert len(set(texts)) == 3
    assert whole["usage"]["completion_tokens"] == 27


def test_two_parallel_tool_calls_join_to_valid_json_in_both_modes(system: System) -> None:
    first, second = json.dumps({"city": "Paris", "unit": "C"}), json.dumps({"q": ["a", 'b"']})
    calls = [
        {"name": "weather", "arguments": [first[at : at + 3] for at in range(0, len(first), 3)]},
        {"name": "search", "arguments": re.findall(r".{1,2}", second)},
    ]
    assert len(calls[0]["arguments"]) >= 10
    body = chat(sim={"tool_calls": calls})
    with system.client() as client:
        whole = collect(client, body)["choices"][0]
        parts = stream(client, body)
    deltas = [
        delta
        for chunk in parts.chunks
        for choice in chunk["choices"]
        for delta in choice["delta"].get("tool_calls", ())
    ]
    joined = ["", ""]
    for delta in deltas:
        joined[delta["index"]] += delta["function"]["arguments"]
    assert joined == [first, second]
    assert len([delta for delta in deltas if "id" in delta]) == 2
    assert [delta["function"]["name"] for delta in deltas if "name" in delta["function"]] == [
        "weather",
        "search",
    ]
    assert parts.reasons() == {0: "tool_calls"}
    assert whole["finish_reason"] == "tool_calls"
    assert [call["function"]["arguments"] for call in whole["message"]["tool_calls"]] == joined
    ids = [call["id"] for call in whole["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert whole["message"]["content"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_minus_infinity_is_a_finite_number_in_json(system: System, path: str) -> None:
    body = chat(logprobs=True, top_logprobs=1)
    if path == COMPLETIONS:
        body = {"model": "sim", "prompt": "x", "logprobs": 1}
    body["sim"] = hook("a", "b", logprobs=["-inf", -0.5])
    with system.client() as client:
        parts = stream(client, body, path)
        raw = client.post(path, json=body).text
    for text in (parts.raw.decode(), raw):
        assert "Infinity" not in text
        assert "NaN" not in text
    [first, second] = [chunk["choices"][0]["logprobs"] for chunk in parts.chunks[:2]]
    found = [
        logprobs["content"][0]["logprob"] if path == CHAT else logprobs["token_logprobs"][0]
        for logprobs in (first, second)
    ]
    assert found == [-9999.0, -0.5]


def test_an_emoji_in_two_byte_pieces_arrives_as_one(system: System) -> None:
    body = chat(sim=hook("hi ", {"hex": "f09f"}, {"hex": "9880"}, "!"))
    with system.client() as client:
        parts = stream(client, body)
        whole = collect(client, body)["choices"][0]["message"]["content"]
    assert parts.text() == whole == "hi 😀!"
    assert "\ufffd".encode() not in parts.raw
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in parts.chunks]
    assert "😀" in contents


def test_a_stop_string_over_two_pieces_never_leaks(system: System) -> None:
    body = chat(stop=["<END>"], sim=hook("one ", "tw", "o <E", "ND> three", " four"))
    with system.client() as client:
        parts = stream(client, body)
        whole = collect(client, body)["choices"][0]
    assert parts.text() == whole["message"]["content"] == "one two "
    assert b"<" not in parts.raw
    assert parts.reasons() == {0: "stop"}
    assert whole["finish_reason"] == "stop"


def test_a_near_miss_of_a_stop_string_arrives_whole(system: System) -> None:
    body = chat(stop=["<END>"], sim=hook("a <E", "N", "D", " b <EN", "<E"))
    with system.client() as client:
        parts = stream(client, body)
        whole = collect(client, body)["choices"][0]
    assert parts.text() == whole["message"]["content"] == "a <END b <EN<E"


def test_a_lone_surrogate_is_answered_without_a_fault(system: System) -> None:
    body = rb'{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"a\ud800b"}]}'
    with system.client() as client:
        answer = client.post(CHAT, content=body)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        refusal(answer)
