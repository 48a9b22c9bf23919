"""OpenAI's SDK for Python raises its own exception for every refusal and failure of ours."""

import asyncio
from typing import Any

import openai
import pytest

from tests.clients.asking import MESSAGES, MODEL, async_client, client, says
from tests.clients.conftest import KEYS


def ask(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.chat.completions.create(**{"model": MODEL, "messages": MESSAGES} | more)


def test_what_is_out_of_range_is_a_bad_request_that_names_it(url: str) -> None:
    with client(url) as sdk, pytest.raises(openai.BadRequestError) as refused:
        ask(sdk, temperature=3)
    assert (refused.value.param, refused.value.status_code) == ("temperature", 400)
    assert (refused.value.request_id or "").startswith("req_")


def test_a_prompt_beyond_the_context_is_a_bad_request_with_its_code(url: str) -> None:
    with client(url) as sdk, pytest.raises(openai.BadRequestError) as refused:
        ask(sdk, max_tokens=10**6)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(url: str, stream: bool) -> None:
    with client(url) as sdk:
        with pytest.raises(openai.NotFoundError) as refused:
            ask(sdk, model="none", stream=stream)
        with pytest.raises(openai.NotFoundError):
            sdk.models.retrieve("none")
    assert refused.value.code == "model_not_found"


def test_a_failure_in_a_stream_is_raised_after_what_came_before(url: str) -> None:
    with client(url) as sdk:
        stream = ask(sdk, stream=True, extra_body=says("a", "b", "c", fail_at=2))
        seen = [next(stream).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError) as failed:
            next(stream)
    assert seen == ["a", "b"]
    assert failed.value.code == "engine_error"
    assert not isinstance(failed.value, openai.APIStatusError)


def test_a_failure_of_a_whole_answer_is_a_server_error(url: str) -> None:
    with client(url) as sdk, pytest.raises(openai.InternalServerError) as failed:
        ask(sdk, extra_body=says("a", "b", fail_at=1))
    assert failed.value.code == "engine_error"


def test_a_deadline_is_a_server_error_of_its_own_code(url: str) -> None:
    with client(url) as sdk, pytest.raises(openai.InternalServerError) as failed:
        ask(
            sdk,
            extra_body=says("a", hang_at=0),
            extra_headers={"x-request-timeout": "0.5"},
        )
    assert (failed.value.status_code, failed.value.code) == (504, "deadline_exceeded")


def test_a_wrong_key_is_an_authentication_error_on_every_door(keyed_url: str) -> None:
    with client(keyed_url, key="sk-wrong") as sdk:
        doors = (
            lambda: ask(sdk),
            lambda: ask(sdk, stream=True),
            lambda: sdk.completions.create(model=MODEL, prompt="a"),
            lambda: sdk.responses.create(model=MODEL, input="a"),
            lambda: sdk.responses.retrieve("resp_" + "0" * 32),
            lambda: sdk.models.list(),
        )
        for door in doors:
            with pytest.raises(openai.AuthenticationError) as refused:
                door()
            assert refused.value.code == "invalid_api_key"


def test_a_spent_limit_is_a_rate_limit_error_that_says_when_to_come_again(keyed_url: str) -> None:
    with client(keyed_url, key=KEYS["narrow"]) as sdk:
        raw = sdk.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=5
        )
        with pytest.raises(openai.RateLimitError) as refused:
            ask(sdk, max_tokens=5)
    assert raw.headers["x-ratelimit-limit-requests"] == "2"
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"
    assert raw.headers["x-ratelimit-limit-tokens"] == "100000"
    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_the_sdk_waits_as_told_and_asks_again_by_itself(keyed_url: str) -> None:
    with client(keyed_url, key=KEYS["paced"]).with_options(max_retries=3) as sdk:
        answers = [ask(sdk, max_tokens=5) for _ in range(2)]
    assert [answer.usage.completion_tokens for answer in answers] == [5, 5]


def test_the_asynchronous_client_raises_the_same(url: str, keyed_url: str) -> None:
    async def run() -> None:
        async with async_client(keyed_url, key="sk-wrong") as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.models.list()
        async with async_client(url) as sdk:
            stream = await sdk.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, extra_body=says("a", "b", fail_at=1)
            )
            await anext(stream)
            with pytest.raises(openai.APIError):
                await anext(stream)

    asyncio.run(run())
