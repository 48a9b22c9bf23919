"""The messages of a socket of responses as values, and what such a socket remembers."""

import json
from typing import Any

import pytest

from schemas.errors import InvalidRequest, QueueFull
from schemas.reply import Broken, Complete, Shown
from schemas.response_events import ResponseEvents
from schemas.wire import Piece, Shape, Usage
from streamer.response_messages import (
    CancelResponse,
    Create,
    ResponseMessages,
    Unclear,
    error_message,
    read,
)
from streamer.response_socket import Turns

REQUEST = "req_" + "0a" * 16
SHAPE = Shape("response", "m", 5, False, 1, False, response=b'{"background":false}')
USAGE = Usage(1, 1, 0)


def test_a_creation_is_the_body_of_a_post() -> None:
    text = '{"type": "response.create", "model": "m", "input": "x"}'
    assert read(text) == Create(None, text.encode(), None)
    text = '{"type":"response.create","stream_id":"a","previous_response_id":"resp_1"}'
    assert read(text) == Create("a", text.encode(), "resp_1")


def test_a_cancellation_names_its_response() -> None:
    text = '{"type": "response.cancel", "response_id": "resp_1"}'
    assert read(text) == CancelResponse("resp_1")


@pytest.mark.parametrize(
    ("text", "stream_id", "param"),
    [
        ("", None, None),
        ("[]", None, None),
        ("[" * 100_000, None, None),
        ("{}", None, "type"),
        ('{"type": "response.steer", "stream_id": "a"}', "a", "type"),
        ('{"type": "response.cancel", "stream_id": "a"}', "a", "response_id"),
        ('{"type": "response.create", "stream_id": ""}', None, "stream_id"),
        ('{"type": "response.create", "stream_id": 5}', None, "stream_id"),
        ('{"type": "response.create", "stream_id": "a", "background": true}', "a", "background"),
        ('{"type": "response.create", "background": "x"}', None, "background"),
    ],
)
def test_what_means_nothing_says_why(text: str, stream_id: str | None, param: str | None) -> None:
    found = read(text)
    assert isinstance(found, Unclear)
    assert found.stream_id == stream_id
    assert isinstance(found.refusal, InvalidRequest)
    assert found.refusal.param == param


def said(texts: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("stream_id", [None, "a", '"\\\n'])
def test_each_event_has_the_stream_s_name_if_there_is_one(stream_id: str | None) -> None:
    own = ResponseMessages(ResponseEvents(REQUEST, SHAPE), stream_id)
    plain = ResponseEvents(REQUEST, SHAPE)
    events = [Shown(0, Piece(0, "a", (1,))), Complete(1, ("stop",), USAGE)]
    expected = [json.loads(event.body) for event in [*plain.opening(), *plain.render(events)]]
    more = {} if stream_id is None else {"stream_id": stream_id}
    assert said([*own.opening(), *own.render(events)]) == [event | more for event in expected]


def test_a_cancelled_response_ends_in_an_error() -> None:
    own = ResponseMessages(ResponseEvents(REQUEST, SHAPE), "a")
    own.opening()
    [error] = said(own.render([Broken("request_cancelled", "Why.", USAGE)]))
    assert error["type"] == "error"
    assert error["status"] == 499
    assert error["stream_id"] == "a"
    assert error["error"]["code"] == "request_cancelled"


def test_an_error_says_when_to_try_again() -> None:
    [error] = said([error_message("a", QueueFull("Full.", retry_after_s=7))])
    assert error == {
        "type": "error",
        "status": 429,
        "error": {
            "message": "Full.",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
            "headers": {"retry-after": "7"},
        },
        "stream_id": "a",
    }


def test_the_oldest_turns_are_forgotten_first() -> None:
    turns = Turns(bytes_max=10)
    for number in range(4):
        turns.put(f"{number}", b"four")
    assert [turns.get(f"{number}") for number in range(4)] == [None, None, b"four", b"four"]
    turns.put("long", b"x" * 11)
    assert [turns.get(name) for name in ("2", "3", "long")] == [None, None, None]
    turns.put("last", b"x" * 10)
    assert turns.get("last") == b"x" * 10
    assert turns.get(None) is None
