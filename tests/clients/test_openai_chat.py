"""OpenAI's SDK for Python on chat completions, completions and models, sync and async."""

import asyncio

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.clients.asking import (
    CALL,
    CITY,
    MESSAGES,
    MODEL,
    PIECES,
    TEXT,
    City,
    async_client,
    checked,
    client,
    hook,
    says,
)

TOOL = openai.pydantic_function_tool(City)


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_a_whole_answer_has_every_choice_its_log_probabilities_and_its_usage(url: str) -> None:
    with client(url) as sdk:
        answer = checked(
            sdk.chat.completions.create(
                model=MODEL, messages=MESSAGES, n=2, max_tokens=5, logprobs=True, top_logprobs=2
            )
        )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    for choice in answer.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert "".join(token.token for token in tokens) == choice.message.content
        assert [len(token.top_logprobs) for token in tokens] == [2] * 5


def test_a_stream_has_one_chunk_per_token_and_its_usage_last(url: str) -> None:
    with client(url) as sdk:
        stream = sdk.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=says(),
        )
        chunks = [checked(chunk) for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks if chunk.choices][:6] == PIECES
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(PIECES)


def test_both_modes_say_the_same(url: str) -> None:
    with client(url) as sdk:
        asked = {"model": MODEL, "messages": MESSAGES, "seed": 7, "max_tokens": 40}
        whole = sdk.chat.completions.create(**asked)  # type: ignore[call-overload]
        parts = list(sdk.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    assert text_of(parts) == whole.choices[0].message.content


def test_the_streams_helper_adds_up_to_the_answer(url: str) -> None:
    with (
        client(url) as sdk,
        sdk.chat.completions.stream(model=MODEL, messages=MESSAGES, extra_body=says()) as stream,
    ):
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert deltas == PIECES
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (TEXT, "stop")


def test_a_called_tool_is_parsed_whole_and_in_parts(url: str) -> None:
    asked = hook(tool_calls=[CALL, CALL])
    with client(url) as sdk:
        answer = sdk.chat.completions.parse(
            model=MODEL, messages=MESSAGES, tools=[TOOL], extra_body=asked
        )
        with sdk.chat.completions.stream(
            model=MODEL, messages=MESSAGES, tools=[TOOL], extra_body=asked
        ) as stream:
            events = list(stream)
            final = stream.get_final_completion()
    for found in (answer, final):
        calls = found.choices[0].message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == [CITY, CITY]
        assert len({call.id for call in calls}) == 2
        assert found.choices[0].finish_reason == "tool_calls"
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.index for event in done] == [0, 1]


def test_a_tools_answer_is_gone_on_from(url: str) -> None:
    with client(url) as sdk:
        first = sdk.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            tools=[TOOL],
            tool_choice="required",
            extra_body=hook(tool_calls=[CALL]),
        )
        message = first.choices[0].message
        [call] = message.tool_calls or []
        told = {"role": "tool", "tool_call_id": call.id, "content": "126000"}
        second = sdk.chat.completions.create(
            model=MODEL,
            messages=[*MESSAGES, message, told],
            tools=[TOOL],
            extra_body=says(),
        )
    assert second.choices[0].message.content == TEXT


def test_an_object_is_parsed_from_what_the_hook_spells(url: str) -> None:
    spelled = says(*CALL["arguments"])
    with client(url) as sdk:
        answer = sdk.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=City, extra_body=spelled
        )
        with sdk.chat.completions.stream(
            model=MODEL, messages=MESSAGES, response_format=City, extra_body=spelled
        ) as stream:
            final = stream.get_final_completion()
    assert [found.choices[0].message.parsed for found in (answer, final)] == [CITY, CITY]


def test_a_stream_that_is_left_is_closed(url: str) -> None:
    with client(url) as sdk:
        with sdk.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, extra_body=says(*PIECES * 100, itl_ms=20)
        ) as stream:
            first = next(iter(stream))
        again = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=says())
    assert first.choices[0].delta.content == PIECES[0]
    assert again.choices[0].message.content == TEXT


def test_a_completion_is_whole_and_streamed(url: str) -> None:
    with client(url) as sdk:
        whole = checked(
            sdk.completions.create(model=MODEL, prompt="Once", echo=True, extra_body=says())
        )
        scored = checked(sdk.completions.create(model=MODEL, prompt="Once", logprobs=2, n=2))
        stream = sdk.completions.create(model=MODEL, prompt="Once", stream=True, extra_body=says())
        parts = list(stream)  # the SDK's own type has no room for OpenAI's null finish_reason
    assert whole.choices[0].text == "Once" + TEXT
    assert "".join(part.choices[0].text for part in parts) == TEXT
    assert parts[-1].choices[0].finish_reason == "stop"
    for choice in scored.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text


def test_models_are_listed_and_found(url: str) -> None:
    with client(url) as sdk:
        listed = [checked(model) for model in sdk.models.list()]
        found = checked(sdk.models.retrieve(MODEL))
    assert found in listed


def test_the_raw_answer_shows_its_id(url: str) -> None:
    with client(url) as sdk:
        raw = sdk.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, extra_body=says()
        )
        parsed = raw.parse()
        with sdk.chat.completions.with_streaming_response.create(
            model=MODEL, messages=MESSAGES, stream=True, extra_body=says()
        ) as streamed:
            lines = [line for line in streamed.iter_lines() if line.startswith("data:")]
    assert raw.headers["x-request-id"].startswith("req_")
    assert parsed._request_id == raw.headers["x-request-id"]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"


def test_a_repeated_key_attaches_to_the_first_answer(url: str) -> None:
    with client(url) as sdk:

        def ask(content: str) -> tuple[str, str | None]:
            raw = sdk.chat.completions.with_raw_response.create(
                model=MODEL,
                messages=[{"role": "user", "content": content}],
                max_tokens=8,
                extra_headers={"Idempotency-Key": "sdk-one"},
            )
            return raw.headers["x-request-id"], raw.parse().choices[0].message.content

        assert ask("a") == ask("a")
        with pytest.raises(openai.ConflictError) as conflict:
            ask("b")
    assert conflict.value.code == "idempotency_conflict"


def test_twenty_asynchronous_streams_are_all_whole(url: str) -> None:
    async def one(sdk: openai.AsyncOpenAI, number: int) -> str:
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            extra_body=says(f"{number}: ", *PIECES, itl_ms=5),
        )
        return text_of([checked(chunk) async for chunk in stream])

    async def run() -> list[str]:
        async with async_client(url) as sdk:
            return await asyncio.gather(*(one(sdk, number) for number in range(20)))

    assert asyncio.run(run()) == [f"{number}: {TEXT}" for number in range(20)]


def test_the_asynchronous_helpers_parse_calls_and_completions(url: str) -> None:
    async def run() -> None:
        async with async_client(url) as sdk:
            answer = await sdk.chat.completions.parse(
                model=MODEL, messages=MESSAGES, tools=[TOOL], extra_body=hook(tool_calls=[CALL])
            )
            async with sdk.chat.completions.stream(
                model=MODEL, messages=MESSAGES, extra_body=says()
            ) as stream:
                final = await stream.get_final_completion()
            parts = [
                part.choices[0].text
                async for part in await sdk.completions.create(
                    model=MODEL, prompt="Once", stream=True, extra_body=says()
                )
            ]
            models = [model.id async for model in sdk.models.list()]
        [call] = answer.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == CITY
        assert final.choices[0].message.content == "".join(parts) == TEXT
        assert models == [MODEL]

    asyncio.run(run())
