"""LangChain's ChatOpenAI: streams, calls tools, and gets objects by each of its methods."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.asking import (
    CALL,
    CITY,
    MODEL,
    PATIENCE_S,
    PIECES,
    TEXT,
    City,
    hook,
    says,
)


@tool
def city(name: str, people: int) -> str:
    """Look a city up."""
    return f"{name} has {people}."


CITY_CALL = CALL | {"name": "city"}


class Chats:
    """Makes models of one system; they share a connection pool that is closed in the end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.http = openai.DefaultHttpxClient(verify=False)  # reading CA files takes long

    def __call__(self, extra_body: dict[str, Any], **more: Any) -> ChatOpenAI:
        return ChatOpenAI(
            model=MODEL,
            base_url=f"{self._url}/v1",
            api_key="none",  # type: ignore[arg-type]
            timeout=PATIENCE_S,
            max_retries=0,
            http_client=self.http,
            extra_body=extra_body,
            **more,
        )


@pytest.fixture
def chat(url: str) -> Iterator[Chats]:
    """What makes models."""
    chats = Chats(url)
    yield chats
    chats.http.close()


def test_a_stream_has_one_chunk_per_token_and_its_usage(chat: Chats) -> None:
    chunks = list(chat(says(), stream_usage=True).stream("Where?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk  # type: ignore[assignment]
    assert [chunk.text for chunk in chunks if chunk.text] == PIECES
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len(PIECES)
    assert whole.response_metadata["finish_reason"] == "stop"


def test_an_asynchronous_stream_and_a_whole_answer_say_the_same(chat: Chats) -> None:
    async def run() -> list[str]:
        async with openai.DefaultAsyncHttpxClient(verify=False) as http:
            model = chat(says(), http_async_client=http)
            return [chunk.text async for chunk in model.astream("Where?")]

    assert "".join(asyncio.run(run())) == chat(says()).invoke("Where?").text == TEXT


def test_a_tool_is_called_streamed_and_not_and_its_result_gone_on_from(chat: Chats) -> None:
    model = chat(hook(tool_calls=[CITY_CALL])).bind_tools([city])
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
    after = chat(says()).bind_tools([city])
    assert after.invoke([HumanMessage("Where?"), said, result]).text == TEXT


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_an_object_is_got_by_every_method(
    chat: Chats, method: Literal["function_calling", "json_schema", "json_mode"]
) -> None:
    called = hook(tool_calls=[CALL])
    spelled = says(*CALL["arguments"])
    model = chat(called if method == "function_calling" else spelled)
    assert model.with_structured_output(City, method=method).invoke("Where?") == CITY


def test_the_responses_api_is_spoken_too(chat: Chats) -> None:
    model = chat(says(), use_responses_api=True)
    assert model.invoke("Where?").text == TEXT
    assert "".join(chunk.text for chunk in model.stream("Where?")) == TEXT


def test_a_failure_in_a_stream_is_raised(chat: Chats) -> None:
    stream = chat(says("a", "b", fail_at=1)).stream("Where?")
    assert next(stream).text == "a"
    with pytest.raises(openai.APIError):
        list(stream)
