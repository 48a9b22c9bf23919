"""The messages of a WebSocket as values."""

import json
from typing import Any

import pytest

from schemas.depth import DEPTH_MAX
from schemas.errors import QueueFull, RequestCancelled
from schemas.reply import Broken, Complete, Shown
from schemas.wire import Piece, Shape, Usage
from streamer.chunks import Chunks
from streamer.messages import (
    Auth,
    Begin,
    Cancel,
    Close,
    MessageLines,
    Unclear,
    error_message,
    read,
)

SHAPE = Shape("chat", "m", 5, True, 1, False)


def test_what_a_client_says_is_read() -> None:
    assert read('{"id":"a","body":{"x": 1}}') == Begin("a", b'{"x": 1}')
    assert read('{"id":"a","body":null}') == Begin("a", b"null")
    assert read('{"id":"a","type":"cancel"}') == Cancel("a")
    assert read('{"type":"auth","key":"k"}') == Auth("k")
    assert read('{"id":"a","body":{},"more":1}') == Begin("a", b"{}")
    assert read('{"id":"a","body":{},"idempotency_key":null}') == Begin("a", b"{}")
    assert read('{"id":"a","body":{},"timeout_s":2}') == Begin("a", b"{}", 2.0)
    assert read('{"id":"a","body":{},"timeout_s":840.0}') == Begin("a", b"{}", 840.0)
    assert read('{"id":"a","body":{},"timeout_s":null}') == Begin("a", b"{}")


@pytest.mark.parametrize(
    ("text", "name", "param"),
    [
        ("", None, None),
        ("[]", None, None),
        ('{"id":', None, None),
        ('{"id":1,"body":{}}', None, "id"),
        ('{"body":{}}', None, "id"),
        ('{"id":"","body":{}}', None, "id"),
        ('{"id":"a","type":"other"}', "a", "type"),
        ('{"id":"a"}', "a", "body"),
        ('{"type":"auth","key":5}', None, "key"),
        ('{"id":"a","body":{},"idempotency_key":"k"}', "a", "idempotency_key"),
        ('{"id":"a","body":{},"timeout_s":0}', "a", "timeout_s"),
        ('{"id":"a","body":{},"timeout_s":840.5}', "a", "timeout_s"),
        ('{"id":"a","body":{},"timeout_s":"5"}', "a", "timeout_s"),
    ],
)
def test_what_means_nothing_says_why_and_whose_it_is(
    text: str, name: str | None, param: str | None
) -> None:
    found = read(text)
    assert isinstance(found, Unclear)
    assert found.id == name
    assert found.refusal.param == param
    assert found.refusal.status == 400


def _messages(*events: Any) -> list[dict[str, Any]]:
    lines = MessageLines('a"é', Chunks("req_1", SHAPE))
    return [json.loads(message) for message in lines.render(events)]


def test_a_whole_reply_is_its_chunks_the_usage_and_done() -> None:
    sse = Chunks("req_1", SHAPE)
    piece = Piece(0, "text\n", (7,))
    messages = _messages(Shown(0, piece), Complete(1, ("stop",), Usage(3, 1, 0)))
    expected = [sse.piece(piece), sse.finish(("stop",)), sse.usage(Usage(3, 1, 0))]
    assert [message["chunk"] for message in messages[:-1]] == [
        json.loads(c or b"") for c in expected
    ]
    assert messages[-1] == {"id": 'a"é', "done": True}
    assert {message["id"] for message in messages} == {'a"é'}


def test_a_token_without_text_makes_no_message() -> None:
    assert len(_messages(Shown(0, Piece(0, "a", (1,))), Shown(1, Piece(0, "", (2,))))) == 1


def test_a_broken_reply_ends_in_its_error() -> None:
    [message] = _messages(Broken("worker_lost", "Gone.", Usage(1, 0, 0)))
    assert message["error"]["code"] == "worker_lost"
    assert set(message) == {"id", "error"}


def test_an_error_of_no_request_has_the_id_null() -> None:
    message = json.loads(error_message(None, RequestCancelled("x")))
    assert message["id"] is None
    assert set(message["error"]) == {"message", "type", "param", "code"}


def test_an_error_says_when_to_come_again() -> None:
    message = json.loads(error_message("a", QueueFull("Full.", retry_after_s=7)))
    assert message["id"] == "a"
    assert message["error"]["headers"] == {"retry-after": "7"}


def test_a_close_reason_fits_its_frame_and_is_whole_text() -> None:
    reason = Close(1008, "é" * 100).fields()["reason"]
    assert reason == "é" * 61


def test_a_message_is_nested_no_deeper_than_its_body_may_be() -> None:
    def of(levels: int) -> str:
        return '{"id":"a","body":' + "[" * levels + "]" * levels + "}"

    assert isinstance(read(of(DEPTH_MAX)), Begin)
    unclear = read(of(DEPTH_MAX + 1))
    assert isinstance(unclear, Unclear)
    assert "deep" in unclear.refusal.message
