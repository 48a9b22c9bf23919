"""OpenAI's SDK for Python on the Responses API, over HTTP and over its WebSocket mode."""

import asyncio
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.clients.asking import (
    CALL,
    CITY,
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
from tests.waiting import wait_for

# The SDK's own affair with the library of its socket.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:connect\(\) must be used as a context manager:DeprecationWarning"
)

TOOL: Any = {
    "type": "function",
    "name": "City",
    "parameters": City.model_json_schema(),
    "strict": True,
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}


def gathered(events: Iterable[Any]) -> list[Any]:
    """Return events, each checked against the SDK's types, numbered from the first without hole."""
    found = [EVENT.validate_python(event.to_dict()) for event in events]
    first = found[0].sequence_number
    assert [event.sequence_number for event in found] == list(range(first, first + len(found)))
    return found


def text_of(events: Iterable[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def ended(sdk: openai.OpenAI, response: str) -> Response:
    """Return a response once it has ended."""
    running = ("queued", "in_progress")
    wait_for(
        lambda: sdk.responses.retrieve(response).status not in running, within_s=60, what="its end"
    )
    return sdk.responses.retrieve(response)


def test_a_response_is_whole_stored_and_deleted(url: str) -> None:
    with client(url) as sdk:
        made = checked(
            sdk.responses.create(
                model=MODEL,
                input="Where?",
                instructions="Be short.",
                metadata={"a": "b"},
                extra_body=says(),
            )
        )
        assert (made.output_text, made.status) == (TEXT, "completed")
        assert checked(sdk.responses.retrieve(made.id)) == made
        items = [checked(item) for item in sdk.responses.input_items.list(made.id)]
        assert [item.content[0].text for item in items] == ["Where?"]  # type: ignore[union-attr]
        sdk.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(made.id)


def test_every_event_of_a_stream_is_of_the_sdks_types(url: str) -> None:
    with client(url) as sdk:
        stream = sdk.responses.create(
            model=MODEL,
            input="Where?",
            tools=[TOOL],
            stream=True,
            include=["message.output_text.logprobs"],
            extra_body=says(tool_calls=[CALL]),
        )
        events = gathered(stream)
    assert text_of(events) == TEXT
    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    message, call = events[-1].response.output
    assert len(message.content[0].logprobs) == len(PIECES)
    assert City.model_validate_json(call.arguments) == CITY


def test_a_bounded_answer_is_incomplete_and_a_failed_one_says_why(url: str) -> None:
    with client(url) as sdk:
        bounded = sdk.responses.create(
            model=MODEL,
            input="a",
            max_output_tokens=4,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        last = gathered(bounded)[-1]
        failing = sdk.responses.create(
            model=MODEL, input="a", stream=True, extra_body=says("a", "b", fail_at=1)
        )
        failed = gathered(failing)[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert failed.type == "response.failed"
    assert failed.response.error.code == "server_error"


def test_the_helpers_parse_calls_and_objects(url: str) -> None:
    with client(url) as sdk:
        tools = [openai.pydantic_function_tool(City)]
        flat: Any = [{"type": "function", **tool["function"]} for tool in tools]
        asked = says("a", tool_calls=[CALL])
        with sdk.responses.stream(model=MODEL, input="a", tools=flat, extra_body=asked) as stream:
            names = [event.type for event in stream]
            final = stream.get_final_response()
        spelled = says(*CALL["arguments"])
        parsed = sdk.responses.parse(model=MODEL, input="a", text_format=City, extra_body=spelled)
    assert names[-1] == "response.completed"
    assert final.output[1].parsed_arguments == CITY.model_dump()  # type: ignore[union-attr]
    assert parsed.output_parsed == CITY


def test_a_conversation_goes_on_from_what_was_put_out(url: str) -> None:
    with client(url) as sdk:
        first = sdk.responses.create(
            model=MODEL, input="Where?", tools=[TOOL], extra_body=hook(tool_calls=[CALL])
        )
        [call] = first.output
        told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}  # type: ignore[union-attr]
        by_id = sdk.responses.create(
            model=MODEL,
            input=[told],
            previous_response_id=first.id,
            tools=[TOOL],
            extra_body=says(),
        )
        again: Any = [{"role": "user", "content": "Where?"}, *first.output, told]
        by_items = sdk.responses.create(model=MODEL, input=again, tools=[TOOL], extra_body=says())
        kinds = [item.type for item in sdk.responses.input_items.list(by_id.id, order="asc")]
    assert by_id.output_text == by_items.output_text == TEXT
    assert by_id.previous_response_id == first.id
    assert kinds == ["message", "function_call", "function_call_output"]
    assert by_id.usage is not None
    assert by_items.usage is not None
    assert by_id.usage.input_tokens == by_items.usage.input_tokens


def test_a_response_in_the_background_is_awaited_and_read_again(url: str) -> None:
    with client(url) as sdk:
        made = sdk.responses.create(
            model=MODEL, input="a", background=True, extra_body=says(itl_ms=20)
        )
        assert checked(made).status == "queued"
        assert checked(ended(sdk, made.id)).output_text == TEXT
        events = gathered(sdk.responses.retrieve(made.id, stream=True))
        rest = gathered(sdk.responses.retrieve(made.id, stream=True, starting_after=5))
    assert text_of(events) == TEXT
    assert rest == events[6:]


def test_a_background_stream_that_breaks_off_is_resumed_after_its_last_event(url: str) -> None:
    with client(url) as sdk:
        seen = []
        with sdk.responses.create(
            model=MODEL,
            input="a",
            background=True,
            stream=True,
            extra_body=says(*PIECES * 10, itl_ms=20),
        ) as stream:
            for event in stream:
                seen.append(event)
                if len(seen) == 12:
                    break
        name = seen[0].response.id  # type: ignore[union-attr]
        rest = sdk.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
        events = gathered([*seen, *rest])
    assert text_of(events) == TEXT * 10
    assert events[-1].type == "response.completed"


def test_the_helper_resumes_a_background_response_by_its_id(url: str) -> None:
    with client(url) as sdk:
        made = sdk.responses.create(model=MODEL, input="a", background=True, extra_body=says())
        with sdk.responses.stream(response_id=made.id) as stream:
            assert text_of(stream) == TEXT
            assert stream.get_final_response().output_text == TEXT


def test_a_response_in_the_background_is_cancelled(url: str) -> None:
    with client(url) as sdk:
        made = sdk.responses.create(
            model=MODEL, input="a", background=True, extra_body=says("a", "b", hang_at=1)
        )
        sdk.responses.cancel(made.id)
        assert checked(ended(sdk, made.id)).status == "cancelled"
        with pytest.raises(openai.APIError) as left:
            gathered(sdk.responses.retrieve(made.id, stream=True))
    assert left.value.code == "request_cancelled"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": "a", "previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "temperature": 3}, "temperature"),
    ],
)
def test_what_cannot_be_served_is_a_bad_request_that_names_it(
    url: str, asked: dict[str, Any], param: str
) -> None:
    with client(url) as sdk, pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(model=MODEL, **asked)
    assert refused.value.param == param


def test_responses_come_over_the_sdks_socket_one_after_another(url: str) -> None:
    with client(url) as sdk, sdk.responses.connect() as socket:
        whole = sdk.responses.create(model=MODEL, input="a", max_output_tokens=9)
        socket.response.create(model=MODEL, input="a", max_output_tokens=9)
        first = _until_end(socket)
        name = first[-1].response.id
        socket.response.create(model=MODEL, input="b", previous_response_id=name)
        second = _until_end(socket)
        socket.response.create(model="none", input="c")
        [refused] = _until_end(socket)
        stored = sdk.responses.retrieve(second[-1].response.id)
    assert text_of(first) == whole.output_text
    assert text_of(second) == stored.output_text
    assert stored.previous_response_id == name
    assert (refused.type, refused.error.code) == ("error", "model_not_found")


def test_every_event_on_the_sdks_socket_is_of_its_types(url: str) -> None:
    asked: Any = {"type": "response.create", "model": MODEL, "input": "a", "tools": [TOOL]}
    with client(url) as sdk, sdk.responses.connect() as socket:
        socket.send(asked | says(tool_calls=[CALL]))
        events = [checked(event) for event in _until_end(socket)]
    assert text_of(events) == TEXT
    assert events[-1].response.output[1].name == "City"


def test_responses_come_over_the_sdks_asynchronous_socket_side_by_side(url: str) -> None:
    async def run() -> None:
        said: dict[str, list[Any]] = {name: [] for name in "abc"}
        async with async_client(url) as sdk, sdk.responses.connect() as socket:
            for name in said:
                await socket.response.create(
                    model=MODEL, input=name, stream_id=name, max_output_tokens=20
                )
            async for event in socket:
                said[event.stream_id].append(event)
                if all(events and events[-1].type in ENDS for events in said.values()):
                    break
            for name, events in said.items():
                whole = await sdk.responses.create(model=MODEL, input=name, max_output_tokens=20)
                assert text_of(events) == whole.output_text

    asyncio.run(run())


def test_the_asynchronous_client_streams_stores_and_resumes(url: str) -> None:
    async def run() -> None:
        async with async_client(url) as sdk:
            stream = await sdk.responses.create(
                model=MODEL, input="a", stream=True, extra_body=says()
            )
            events = gathered([event async for event in stream])
            name = events[0].response.id
            again = await sdk.responses.retrieve(name, stream=True, starting_after=3)
            assert gathered([event async for event in again]) == events[4:]
            assert (await sdk.responses.retrieve(name)).output_text == TEXT
            await sdk.responses.delete(name)

    asyncio.run(run())


def test_both_clients_count_what_a_response_is_charged(url: str) -> None:
    async def run() -> int:
        async with async_client(url) as sdk:
            counted = await sdk.responses.input_tokens.count(model=MODEL, input="a", tools=[TOOL])
            return checked(counted).input_tokens

    with client(url) as sdk:
        counted = checked(sdk.responses.input_tokens.count(model=MODEL, input="a", tools=[TOOL]))
        made = sdk.responses.create(model=MODEL, input="a", tools=[TOOL], extra_body=says())
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens == asyncio.run(run())


def _until_end(socket: Any) -> list[Any]:
    events = []
    for event in socket:
        events.append(event)
        if event.type in ENDS:
            break
    return events
