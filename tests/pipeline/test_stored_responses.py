"""Stored responses over the whole path: read, resumed, gone on from, cancelled, deleted."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from schemas.subjects import new_request_id
from tests.pipeline.asking import refusal
from tests.pipeline.conftest import System
from tests.sse import events_of
from tests.waiting import wait_for

PIECES = [f"{number} " for number in range(30)]


@pytest.fixture
def sdk(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{system.url}/v1", api_key="none", timeout=20, max_retries=0
    ) as client:
        yield client


def hooked(*pieces: str, **more: Any) -> dict[str, Any]:
    return {"sim": {"pieces": pieces} | more}


def slow(**more: Any) -> dict[str, Any]:
    """Return a response in the background of 30 tokens, 20 ms apart."""
    body = hooked(*PIECES, itl_ms=20, ttft_ms=0)
    return {"model": "sim", "input": "Count.", "background": True, "extra_body": body} | more


def wait_until(sdk: openai.OpenAI, name: str, is_so: Callable[[Response], bool]) -> Response:
    """Read a response until something holds of it, and return it."""
    found: list[Response] = []

    def holds() -> bool:
        found[:] = [sdk.responses.retrieve(name)]
        return is_so(found[0])

    wait_for(holds, within_s=20, what=f"{name} is as it should be")
    return found[0]


def ended(response: Response) -> bool:
    return response.status not in ("queued", "in_progress")


def test_a_stored_response_is_read_as_it_was_given(sdk: openai.OpenAI) -> None:
    given = sdk.responses.create(
        model="sim", input="x", metadata={"a": "b"}, extra_body=hooked("Hel", "lo")
    )
    assert wait_until(sdk, given.id, ended) == given


def test_a_response_that_is_not_stored_is_not_found(sdk: openai.OpenAI) -> None:
    given = sdk.responses.create(model="sim", input="x", store=False, extra_body=hooked("a"))
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(given.id)
    with pytest.raises(openai.BadRequestError) as error:
        sdk.responses.create(model="sim", input="y", previous_response_id=given.id)
    assert error.value.code == "previous_response_not_found"
    assert error.value.param == "previous_response_id"


def test_a_response_in_the_background_is_answered_at_once_and_runs_to_its_end(
    system: System, sdk: openai.OpenAI
) -> None:
    queued = sdk.responses.create(**slow())
    assert queued.status == "queued"
    assert queued.background is True
    assert queued.output == []
    running = wait_until(sdk, queued.id, lambda found: bool(found.output_text))
    assert running.status in ("in_progress", "completed")
    done = wait_until(sdk, queued.id, ended)
    assert done.status == "completed"
    assert done.output_text == "".join(PIECES)
    assert done.created_at == queued.created_at
    system.wait_at_rest()


def test_one_that_waits_for_a_slot_is_queued(system: System, sdk: openai.OpenAI) -> None:
    asked = slow(model="tiny", extra_body=hooked("a", ttft_ms=120_000))
    first, second = (sdk.responses.create(**asked) for _ in range(2))
    wait_until(sdk, first.id, lambda found: found.status == "in_progress")
    assert sdk.responses.retrieve(second.id).status == "queued"
    for each in (second, first):
        cancelled = sdk.responses.cancel(each.id)
        assert cancelled.status == "cancelled"
        assert cancelled.id == each.id
    system.wait_at_rest()


def test_a_stream_is_gone_on_with_after_any_event_live_and_replayed(
    system: System, sdk: openai.OpenAI
) -> None:
    first: list[Any] = []
    with sdk.responses.create(**slow(stream=True)) as stream:
        for event in stream:
            first.append(event)
            if len(first) == 12:
                break
    assert first[0].type == "response.created"
    assert first[0].response.status == "queued"
    name = first[0].response.id
    rest = list(sdk.responses.retrieve(name, stream=True, starting_after=11))
    assert [event.sequence_number for event in [*first, *rest]] == list(range(12 + len(rest)))
    assert rest[-1].type == "response.completed"
    texts = [e.delta for e in [*first, *rest] if e.type == "response.output_text.delta"]
    assert texts == PIECES
    with system.client() as client:
        whole = client.get(f"/v1/responses/{name}", params={"stream": "true"})
        part = client.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": 20})
    events = events_of(whole.content)
    assert [event.json for event in events[12:]] == [event.to_dict() for event in rest]
    assert events_of(part.content) == events[21:]
    system.wait_at_rest()


def test_the_official_sdk_s_helper_resumes_by_the_response_s_id(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(
        model="sim", input="x", background=True, extra_body=hooked(*PIECES, itl_ms=5)
    ) as stream:
        for event in stream:
            if event.type == "response.created":
                name = event.response.id
            if event.sequence_number == 8:
                break
    with sdk.responses.stream(response_id=name, starting_after=8) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events][:2] == [9, 10]
    assert events[-1].type == "response.completed"


def test_a_conversation_goes_on_from_a_response(sdk: openai.OpenAI) -> None:
    first = sdk.responses.create(
        model="sim", instructions="Rhyme.", input="I say A.", extra_body=hooked("You say B.")
    )
    asked: dict[str, Any] = {"model": "sim", "max_output_tokens": 12, "instructions": "Be brief."}
    second = sdk.responses.create(**asked, input="And then?", previous_response_id=first.id)
    by_hand = sdk.responses.create(
        **asked,
        input=[
            {"role": "user", "content": "I say A."},
            {"role": "assistant", "content": "You say B."},
            {"role": "user", "content": "And then?"},
        ],
    )
    assert second.output_text == by_hand.output_text
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert by_hand.usage is not None
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    sdk.responses.delete(first.id)
    third = sdk.responses.create(
        model="sim", input="More.", previous_response_id=second.id, extra_body=hooked("C")
    )
    items = list(sdk.responses.input_items.list(third.id, order="asc", limit=2))
    texts = [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["I say A.", "You say B.", "And then?", second.output_text, "More."]


def test_a_tool_s_output_goes_on_from_its_call(sdk: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    first = sdk.responses.create(
        model="sim",
        input="Weather?",
        tools=tools,
        extra_body=hooked(tool_calls=[{"name": "f", "arguments": ["{", "}"]}]),
    )
    [call] = first.output
    assert call.type == "function_call"
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    second = sdk.responses.create(
        model="sim", input=output, previous_response_id=first.id, extra_body=hooked("Sunny.")
    )
    assert second.output_text == "Sunny."
    items = list(sdk.responses.input_items.list(second.id))
    assert [item.type for item in items] == ["function_call_output", "function_call", "message"]


def test_input_items_come_in_pages(system: System, sdk: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"{number}"} for number in range(5)]
    made = sdk.responses.create(model="sim", input=turns, extra_body=hooked("a"))
    page = sdk.responses.input_items.list(made.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["4", "3"]  # type: ignore[union-attr]
    assert page.has_more
    with system.client() as client:
        for query, param in (
            ({"limit": "0"}, "limit"),
            ({"limit": "101"}, "limit"),
            ({"order": "up"}, "order"),
            ({"after": "msg_nonsense"}, "after"),
        ):
            answer = client.get(f"/v1/responses/{made.id}/input_items", params=query)
            assert answer.status_code == 400
            assert refusal(answer)["param"] == param


def test_one_that_runs_is_cancelled_once_and_for_good(system: System, sdk: openai.OpenAI) -> None:
    made = sdk.responses.create(**slow(extra_body=hooked("a", "b", itl_ms=120_000)))
    wait_until(sdk, made.id, lambda found: found.output_text == "a")
    for _ in range(2):
        cancelled = sdk.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert cancelled.output_text == "a"
    assert sdk.responses.retrieve(made.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError) as error:
        sdk.responses.create(model="sim", input="y", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"
    with pytest.raises(openai.APIError) as ended_so:
        list(sdk.responses.retrieve(made.id, stream=True))
    assert ended_so.value.code == "request_cancelled"
    system.wait_at_rest()


def test_only_a_response_in_the_background_is_cancelled(sdk: openai.OpenAI) -> None:
    made = sdk.responses.create(model="sim", input="x", extra_body=hooked("a"))
    with pytest.raises(openai.BadRequestError):
        sdk.responses.cancel(made.id)


def test_one_that_has_ended_is_not_gone_back_on_by_a_cancel(sdk: openai.OpenAI) -> None:
    made = sdk.responses.create(**slow(extra_body=hooked("a")))
    wait_until(sdk, made.id, ended)
    assert sdk.responses.cancel(made.id).status == "completed"


def test_one_that_has_not_ended_is_not_gone_on_from(system: System, sdk: openai.OpenAI) -> None:
    made = sdk.responses.create(**slow(extra_body=hooked("a", ttft_ms=120_000)))
    with pytest.raises(openai.BadRequestError) as error:
        sdk.responses.create(model="sim", input="y", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"
    sdk.responses.delete(made.id)
    system.wait_at_rest()


def test_a_deleted_response_is_nowhere(system: System, sdk: openai.OpenAI) -> None:
    done = sdk.responses.create(model="sim", input="x", extra_body=hooked("a"))
    running = sdk.responses.create(**slow(extra_body=hooked("a", "b", itl_ms=120_000)))
    wait_until(sdk, running.id, lambda found: found.output_text == "a")
    for made in (done, running):
        with system.client() as client:
            said = client.delete(f"/v1/responses/{made.id}")
            assert said.json() == {"id": made.id, "object": "response", "deleted": True}
            for path in ("", "?stream=true", "/input_items"):
                answer = client.get(f"/v1/responses/{made.id}{path}")
                assert answer.status_code == 404
                assert refusal(answer)["code"] == "not_found"
            assert client.post(f"/v1/responses/{made.id}/cancel").status_code == 404
            assert client.delete(f"/v1/responses/{made.id}").status_code == 404
        with pytest.raises(openai.BadRequestError):
            sdk.responses.create(model="sim", input="y", previous_response_id=made.id)
    system.wait_at_rest()


@pytest.mark.parametrize(
    "name",
    ["nonsense", "resp_", new_request_id().replace("req_", "resp_"), "resp_" + "é" * 32],
    ids=["a word", "no digits", "never made", "other letters"],
)
def test_an_unknown_response_is_not_found(system: System, name: str) -> None:
    with system.client() as client:
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
        ):
            answer = client.request(method, f"/v1/responses/{name}{path}")
            assert answer.status_code == 404
            assert refusal(answer)["code"] == "not_found"


def test_a_failed_response_is_read_as_failed(sdk: openai.OpenAI) -> None:
    made = sdk.responses.create(**slow(extra_body=hooked("a", "b", fail_at=1)))
    found = wait_until(sdk, made.id, ended)
    assert found.status == "failed"
    assert found.output_text == "a"
    assert found.error is not None
    assert found.error.code == "server_error"


def test_one_whose_client_left_is_cancelled(system: System, sdk: openai.OpenAI) -> None:
    asked = slow(background=False, stream=True, extra_body=hooked("a", ttft_ms=120_000))
    with sdk.responses.create(**asked) as stream:
        created = next(iter(stream))
    assert created.type == "response.created"
    wait_until(sdk, created.response.id, lambda found: found.status == "cancelled")
    system.wait_at_rest(within_s=system.leaves_within_s)


def test_one_idempotency_key_is_one_response(system: System, sdk: openai.OpenAI) -> None:
    asked = slow(extra_headers={"Idempotency-Key": new_request_id()})
    first, second = (sdk.responses.create(**asked) for _ in range(2))
    assert first.id == second.id
    assert first.status == "queued"
    wait_until(sdk, first.id, ended)
    assert sdk.responses.create(**asked).status == "completed"
    system.wait_at_rest()


def test_the_asynchronous_sdk_does_the_same(system: System, sdk: openai.OpenAI) -> None:
    async def run() -> Response:
        async with openai.AsyncOpenAI(
            base_url=f"{system.url}/v1", api_key="none", timeout=20, max_retries=0
        ) as client:
            made = await client.responses.create(**slow())
            events = [
                event
                async for event in await client.responses.retrieve(
                    made.id, stream=True, starting_after=2
                )
            ]
            assert events[0].sequence_number == 3
            last = events[-1]
            assert last.type == "response.completed"
            assert last.response.output_text == "".join(PIECES)
            return last.response

    shown = asyncio.run(run())
    assert wait_until(sdk, shown.id, ended) == shown
    system.wait_at_rest()
