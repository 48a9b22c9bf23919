"""Responses over a WebSocket: the official SDK, and what it does not show."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from openai.resources.responses.responses import AsyncResponsesConnection
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import State

from schemas.subjects import new_request_id
from tests.pipeline.asking import PATIENCE_S
from tests.pipeline.conftest import System

OPENAIS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
PATH = "/v1/responses"


def hooked(*pieces: str, **more: Any) -> dict[str, Any]:
    return {"sim": {"pieces": pieces} | more}


class Talk:
    """One socket; each event is checked against OpenAI's types."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, message: Any) -> None:
        await self.socket.send(message if isinstance(message, str) else json.dumps(message))

    async def create(self, **body: Any) -> None:
        await self.say({"type": "response.create", "model": "sim", "input": "x"} | body)

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            event: dict[str, Any] = json.loads(await self.socket.recv())
        OPENAIS.validate_python(event)
        return event

    async def until(self, *types: str) -> list[dict[str, Any]]:
        """Return the events up to the first of some types."""
        events = [await self.hear()]
        while events[-1]["type"] not in types:
            events.append(await self.hear())
        return events

    async def answer(self, **body: Any) -> dict[str, Any]:
        """Create a response and return its last event."""
        await self.create(**body)
        return (await self.until(*ENDS))[-1]


def on_socket(system: System, test: Callable[[Talk], Awaitable[None]], **more: Any) -> None:
    async def run() -> None:
        url = system.socket_end.url.replace("http", "ws", 1) + PATH
        # Who stands still for a while is to hear what came, not to cut the socket.
        options = {"open_timeout": 60, "ping_interval": None} | more
        socket = await connect(url, compression=None, max_size=None, proxy=None, **options)
        try:
            await test(Talk(socket))
        finally:
            if socket.state is not State.CLOSED:  # closing it twice trips over asyncio's transport
                await socket.close()

    asyncio.run(run())


def text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts)


@pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")  # the SDK's
def test_the_official_sdk_talks_turn_by_turn(system: System) -> None:
    with openai.OpenAI(
        base_url=f"{system.socket_end.url}/v1", api_key="none", timeout=60, max_retries=0
    ) as sdk:
        before: dict[str, Any] = {}
        for text in ("one", "two", "three"):
            with sdk.responses.connect() as connection:
                connection.response.create(model="sim", input=text, max_output_tokens=4, **before)
                events = []
                for event in connection:
                    events.append(event)
                    if event.type in ENDS:
                        break
            assert events[0].type == "response.created"
            last = events[-1]
            assert last.type == "response.incomplete"
            before = {"previous_response_id": last.response.id}
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=60) as sdk:
        items = list(sdk.responses.input_items.list(last.response.id, order="asc"))
    roles = [item.role for item in items if item.type == "message"]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_the_asynchronous_sdk_has_several_streams_on_one_socket(system: System) -> None:
    async def said(connection: AsyncResponsesConnection) -> dict[str, str]:
        texts: dict[str, str] = {}
        ended = 0
        async for event in connection:
            stream_id = event.stream_id  # type: ignore[union-attr]
            assert stream_id is not None
            if event.type == "response.output_text.delta":
                texts[stream_id] = texts.get(stream_id, "") + event.delta
            elif event.type == "response.completed":
                ended += 1
                if ended == 10:
                    break
        return texts

    async def run() -> None:
        async with (
            openai.AsyncOpenAI(
                base_url=f"{system.socket_end.url}/v1", api_key="none", timeout=60
            ) as sdk,
            sdk.responses.connect() as connection,
        ):
            for number in range(10):
                await connection.response.create(
                    model="sim", input="x", stream_id=f"s{number}", max_output_tokens=300
                )
            assert set(await said(connection)) == {f"s{number}" for number in range(10)}

    asyncio.run(run())
    system.wait_at_rest()


def test_events_are_those_of_a_post_with_the_stream_s_name(system: System) -> None:
    body = {"model": "sim", "input": "Tell me.", "max_output_tokens": 12}
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=60) as sdk:
        expected = list(sdk.responses.create(**body, stream=True))  # type: ignore[call-overload]

    async def test(talk: Talk) -> None:
        for more in ({}, {"stream_id": "a"}, {"stream": False}):
            await talk.create(**body, **more)
            events = await talk.until(*ENDS)
            assert [event["type"] for event in events] == [event.type for event in expected]
            numbers = [event["sequence_number"] for event in events]
            assert numbers == list(range(len(events)))
            names = {event.get("stream_id") for event in events}
            assert names == {more.get("stream_id")}
            assert text_of(events[-1]["response"]) == expected[-1].response.output_text

    on_socket(system, test)


def test_one_stream_runs_in_order_and_another_beside_it(system: System) -> None:
    async def test(talk: Talk) -> None:
        await talk.create(stream_id="one", **hooked("a", "b", itl_ms=600_000, ttft_ms=0))
        first = (await talk.until("response.created"))[-1]["response"]["id"]
        await talk.create(stream_id="one", **hooked("c"))
        await talk.create(stream_id="one", **hooked("d"))
        await talk.create(stream_id="two", **hooked("e"))
        events = await talk.until("response.completed")
        assert events[-1]["stream_id"] == "two"
        assert text_of(events[-1]["response"]) == "e"
        await talk.say({"type": "response.cancel", "response_id": first})
        assert (await talk.until("error"))[-1]["stream_id"] == "one"
        for text in ("c", "d"):
            events = await talk.until("response.completed")
            assert {event["stream_id"] for event in events} == {"one"}
            assert events[0]["type"] == "response.created"
            assert text_of(events[-1]["response"]) == text

    on_socket(system, test)
    system.wait_at_rest()


def test_those_without_a_stream_run_one_after_another(system: System) -> None:
    async def test(talk: Talk) -> None:
        for number in range(5):
            await talk.create(**hooked(f"{number}"))
        texts = [text_of((await talk.until(*ENDS))[-1]["response"]) for _ in range(5)]
        assert texts == ["0", "1", "2", "3", "4"]

    on_socket(system, test)


def test_a_cancelled_response_ends_in_an_error_and_the_socket_lives(system: System) -> None:
    async def test(talk: Talk) -> None:
        await talk.create(stream_id="one", **hooked("a", ttft_ms=600_000))
        created = (await talk.until("response.in_progress"))[0]
        name = created["response"]["id"]
        await talk.create(stream_id="one", **hooked("b"))
        await talk.say({"type": "response.cancel", "response_id": name})
        error = await talk.hear()
        assert error["type"] == "error"
        assert error["status"] == 499
        assert error["stream_id"] == "one"
        assert error["error"]["code"] == "request_cancelled"
        assert text_of((await talk.until(*ENDS))[-1]["response"]) == "b"
        await talk.say({"type": "response.cancel", "response_id": name})  # it has ended: silence
        other = new_request_id().replace("req_", "resp_")
        await talk.say({"type": "response.cancel", "response_id": other})
        assert text_of((await talk.answer(**hooked("c")))["response"]) == "c"

    on_socket(system, test)
    system.wait_at_rest()


def test_a_response_that_waits_for_a_slot_says_its_id_and_is_cancelled(system: System) -> None:
    async def test(talk: Talk) -> None:
        names = []
        for stream_id in ("one", "two"):
            await talk.create(model="tiny", stream_id=stream_id, **hooked("a", ttft_ms=600_000))
            events = await talk.until("response.in_progress")
            names.append(events[0]["response"]["id"])
        for name, stream_id in zip(reversed(names), ("two", "one"), strict=True):
            await talk.say({"type": "response.cancel", "response_id": name})
            error = await talk.hear()
            assert error["error"]["code"] == "request_cancelled"
            assert error["stream_id"] == stream_id

    on_socket(system, test)
    system.wait_at_rest()


UNCLEAR: list[tuple[Any, str | None]] = [
    ("{", None),
    ("[]", None),
    ("5", None),
    ({}, "type"),
    ({"type": "response.steer", "previous_response_id": "resp_1", "input": "x"}, "type"),
    ({"type": 5}, "type"),
    ({"type": "response.create", "stream_id": 5}, "stream_id"),
    ({"type": "response.create", "stream_id": ""}, "stream_id"),
    ({"type": "response.create", "stream_id": "x" * 257}, "stream_id"),
    ({"type": "response.create", "input": "x"}, "model"),
    ({"type": "response.create", "model": "sim"}, "input"),
    ({"type": "response.create", "model": "sim", "input": "x", "background": True}, "background"),
    ({"type": "response.create", "model": "nonsense", "input": "x"}, "model"),
    ({"type": "response.create", "model": "sim", "input": "x", "top_p": 5}, "top_p"),
    ({"type": "response.cancel"}, "response_id"),
]


def test_what_is_unclear_gets_an_error_and_the_socket_lives(system: System) -> None:
    async def test(talk: Talk) -> None:
        for message, param in UNCLEAR:
            await talk.say(message)
            error = await talk.hear()
            assert error["type"] == "error", message
            assert error["status"] in (400, 404), message
            assert error["error"]["param"] == param, message
            assert "stream_id" not in error
        assert (await talk.answer(**hooked("a")))["type"] == "response.completed"

    on_socket(system, test)
    system.wait_at_rest()


def test_an_error_names_its_stream(system: System) -> None:
    async def test(talk: Talk) -> None:
        error = await talk.answer(stream_id="one", model="nonsense")
        assert error["stream_id"] == "one"
        assert error["status"] == 404
        assert error["error"]["code"] == "model_not_found"
        failed = await talk.answer(stream_id="one", **hooked("a", "b", fail_at=1))
        assert failed["type"] == "response.failed"
        assert failed["stream_id"] == "one"

    on_socket(system, test)


def test_what_is_stored_nowhere_is_gone_on_from_on_its_own_socket_alone(system: System) -> None:
    names: list[str] = []

    async def test(talk: Talk) -> None:
        before: dict[str, Any] = {}
        for number in range(3):
            more = hooked(f"{number}") | before
            last = await talk.answer(store=False, input=f"say {number}", stream_id="a", **more)
            before = {"previous_response_id": last["response"]["id"]}
        forked = await talk.answer(stream_id="b", input="And?", **before, **hooked("end"))
        assert text_of(forked["response"]) == "end"
        names.extend([before["previous_response_id"], forked["response"]["id"]])

    async def elsewhere(talk: Talk) -> None:
        error = await talk.answer(previous_response_id=names[0])
        assert error["error"]["code"] == "previous_response_not_found"
        assert error["error"]["param"] == "previous_response_id"
        assert error["status"] == 400

    on_socket(system, test)
    on_socket(system, elsewhere)
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=60) as sdk:
        items = list(sdk.responses.input_items.list(names[1], order="asc"))
    texts = [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["say 0", "0", "say 1", "1", "say 2", "2", "And?"]


@pytest.mark.parametrize("store", [True, False])
def test_a_turn_may_be_prepared_without_being_run(system: System, store: bool) -> None:
    async def test(talk: Talk) -> None:
        await talk.create(input="Remember.", generate=False, store=store)
        events = await talk.until(*ENDS)
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        assert events[-1]["response"]["output"] == []
        previous = events[-1]["response"]["id"]
        last = await talk.answer(
            input="Now.", previous_response_id=previous, store=store, max_output_tokens=5
        )
        turns = [{"role": "user", "content": text} for text in ("Remember.", "Now.")]
        by_hand = await talk.answer(input=turns, max_output_tokens=5)
        assert text_of(last["response"]) == text_of(by_hand["response"])
        unknown = await talk.answer(model="nonsense", generate=False)
        assert unknown["error"]["code"] == "model_not_found"

    on_socket(system, test)
    system.wait_at_rest()


def test_a_socket_has_256_responses_and_no_more(system: System) -> None:
    async def test(talk: Talk) -> None:
        for _ in range(256):
            await talk.create(**hooked("a", ttft_ms=600_000))
        for stream_id in (None, "other"):
            more = {} if stream_id is None else {"stream_id": stream_id}
            await talk.create(**more, **hooked("b"))
            error = (await talk.until("error"))[-1]
            assert error["status"] == 429
            assert error["error"]["code"] == "rate_limit_exceeded"
            assert error["error"]["headers"] == {"retry-after": "1"}
            assert error.get("stream_id") == stream_id

    on_socket(system, test)
    system.wait_at_rest()


def test_who_leaves_leaves_nothing_running_or_waiting(system: System) -> None:
    async def test(talk: Talk) -> None:
        for _ in range(3):
            await talk.create(stream_id="one", **hooked("a", ttft_ms=600_000))
        await talk.until("response.created")

    on_socket(system, test)
    system.wait_at_rest()


@pytest.mark.parametrize(("message", "code"), [(b"\x00", 1003), ("x" * (16 * 2**20 + 1), 1009)])
def test_close_codes_are_those_of_every_socket(
    system: System, message: str | bytes, code: int
) -> None:
    async def test(talk: Talk) -> None:
        with contextlib.suppress(ConnectionClosed):
            await talk.socket.send(message)
        with pytest.raises(ConnectionClosed):
            await talk.hear()
        assert talk.socket.close_code == code

    on_socket(system, test)


def test_a_foreign_page_is_refused(system: System) -> None:
    async def test(talk: Talk) -> None:
        raise AssertionError("let in")

    with pytest.raises(InvalidStatus) as refusal:
        on_socket(system, test, origin="https://example.com")
    assert refusal.value.response.status_code == 403
