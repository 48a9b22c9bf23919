"""The API describes itself, its answers are what it describes, and models can be asked for."""

from typing import Any

import msgspec
import pytest

from schemas.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorAnswer,
    Model,
    ModelList,
)
from schemas.response_answers import DeletedResponse, InputItems, ResponseEvent, ResponseObject
from tests.pipeline.asking import CHAT, COMPLETIONS, chat, collect, hook, refusal, stream
from tests.pipeline.conftest import System
from tests.sse import events_of
from tests.waiting import wait_for

RESPONSES = "/v1/responses"


def test_the_description_and_its_page_are_served(system: System) -> None:
    with system.client() as client:
        described = client.get("/openapi.json")
        page = client.get("/docs")
        assert client.post("/docs").status_code == 405
    assert described.headers["content-type"] == "application/json"
    assert {CHAT, COMPLETIONS, "/v1/models"} <= set(described.json()["paths"])
    assert page.headers["content-type"].startswith("text/html")
    assert CHAT in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_a_model_can_be_asked_for_by_name(system: System) -> None:
    with system.client() as client:
        listed = client.get("/v1/models")
        found = client.get("/v1/models/sim")
        unknown = client.get("/v1/models/org/none")
        empty = client.get("/v1/models/")
    models = msgspec.json.decode(listed.content, type=ModelList).data
    model = msgspec.json.decode(found.content, type=Model)
    assert (model.id, model.max_model_len) == ("sim", 32768)
    # Each worker says since when it serves it, and the last one heard is told.
    assert model in [msgspec.structs.replace(each, created=model.created) for each in models]
    assert found.headers["x-request-id"].startswith("req_")
    for absent in (unknown, empty):
        assert absent.status_code == 404
        assert refusal(absent)["code"] == "model_not_found"


CALLS = [{"name": "f", "arguments": ["{", "}"]}]
BODIES: list[dict[str, Any]] = [
    chat(),
    chat(n=2, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}),
    chat(sim={"pieces": ["a"], "tool_calls": CALLS}),
    {"model": "sim", "prompt": "x", "echo": True},
    {"model": "sim", "prompt": "x", "logprobs": 2, "stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(list(body))[:60])
def test_answers_and_events_are_as_described(system: System, body: dict[str, Any]) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    whole, part = (ChatCompletion, ChatCompletionChunk) if path == CHAT else (Completion,) * 2
    plain = {name: value for name, value in body.items() if name != "stream_options"}
    with system.client() as client:
        answer: Any = msgspec.convert(collect(client, plain, path), whole)
        chunks: list[Any] = [
            msgspec.convert(chunk, part) for chunk in stream(client, body, path).chunks
        ]
    assert len(answer.choices) == body.get("n", 1)
    assert len(chunks) > 2


def test_errors_are_as_described_before_and_in_a_stream(system: System) -> None:
    with system.client() as client:
        refused = client.post(CHAT, json=chat(n=0)).content
        failed = stream(client, chat(sim=hook("a", "b", fail_at=1))).events[-1].data.encode()
    assert msgspec.json.decode(refused, type=ErrorAnswer).error.param == "n"
    assert msgspec.json.decode(failed, type=ErrorAnswer).error.code == "engine_error"


def test_a_responses_answers_and_events_are_as_described(system: System) -> None:
    asked = {"model": "sim", "input": "x", "sim": {"pieces": ["a"], "tool_calls": CALLS}}
    with system.client() as client:
        made = client.post(RESPONSES, json=asked).content
        name = msgspec.json.decode(made, type=ResponseObject).id
        one = f"{RESPONSES}/{name}"

        def is_stored() -> bool:
            return bool(client.get(one).json()["status"] == "completed")

        wait_for(is_stored, within_s=15, what="the end, of which its client may be told sooner")
        stored = client.get(one).content
        streamed = client.get(one, params={"stream": "true"})
        items = client.get(f"{one}/input_items").content
        deleted = client.delete(one).content
    assert msgspec.json.decode(stored, type=ResponseObject).status == "completed"
    events = [event.data for event in events_of(streamed.content)]
    numbers = [msgspec.json.decode(each, type=ResponseEvent).sequence_number for each in events]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 10
    [item] = msgspec.json.decode(items, type=InputItems).data
    assert item.type == "message"
    assert msgspec.json.decode(deleted, type=DeletedResponse).deleted
