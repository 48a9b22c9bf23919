"""LangChain's ChatOpenAI: streams, calls tools, and gets objects by each of its methods."""

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.asking import CALL, CITY, MODEL, PIECES, TEXT, City, hook, says


@tool
def city(name: str, people: int) -> str:
    """Look a city up."""
    return f"{name} has {people}."


CITY_CALL = CALL | {"name": "city"}


def chat(url: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="none",  # type: ignore[arg-type]
        timeout=30,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=False),
        http_async_client=openai.DefaultAsyncHttpxClient(verify=False),
        **more,
    )


def test_a_stream_has_one_chunk_per_token_and_its_usage(url: str) -> None:
    chunks = list(chat(url, extra_body=says(), stream_usage=True).stream("Where?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk  # type: ignore[assignment]
    assert [chunk.text for chunk in chunks if chunk.text] == PIECES
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len(PIECES)
    assert whole.response_metadata["finish_reason"] == "stop"


def test_an_asynchronous_stream_and_a_whole_answer_say_the_same(url: str) -> None:
    async def run() -> list[str]:
        return [chunk.text async for chunk in chat(url, extra_body=says()).astream("Where?")]

    assert "".join(asyncio.run(run())) == chat(url, extra_body=says()).invoke("Where?").text == TEXT


def test_a_tool_is_called_streamed_and_not_and_its_result_gone_on_from(url: str) -> None:
    model = chat(url, extra_body=hook(tool_calls=[CITY_CALL])).bind_tools([city])
    said = model.invoke("Where?")
    parts = list(model.stream("Where?"))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    for message in (said, whole):
        [call] = message.tool_calls  # type: ignore[union-attr]
        assert (call["name"], call["args"]) == ("city", CITY.model_dump())
    result = city.invoke(said.tool_calls[0])
    assert isinstance(result, ToolMessage)
    after = chat(url, extra_body=says()).bind_tools([city])
    assert after.invoke([HumanMessage("Where?"), said, result]).text == TEXT


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_an_object_is_got_by_every_method(
    url: str, method: Literal["function_calling", "json_schema", "json_mode"]
) -> None:
    called = hook(tool_calls=[CALL])
    spelled = says(*CALL["arguments"])
    model = chat(url, extra_body=called if method == "function_calling" else spelled)
    assert model.with_structured_output(City, method=method).invoke("Where?") == CITY


def test_the_responses_api_is_spoken_too(url: str) -> None:
    model = chat(url, extra_body=says(), use_responses_api=True)
    assert model.invoke("Where?").text == TEXT
    assert "".join(chunk.text for chunk in model.stream("Where?")) == TEXT


def test_a_failure_in_a_stream_is_raised(url: str) -> None:
    stream = chat(url, extra_body=says("a", "b", fail_at=1)).stream("Where?")
    assert next(stream).text == "a"
    with pytest.raises(openai.APIError):
        list(stream)
