"""Events of a reply as server-sent events: one per token, `[DONE]` once and last, errors alone."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from headrace.event_source import error_event
from schemas.errors import InvalidRequest, refusal_of
from schemas.reply import Broken, Complete, Event, Shown
from schemas.wire import Piece, Shape, Usage
from streamer.chunks import Chunks
from streamer.sse import COMMENT, DONE, EventLines
from tests.sse import Reader, events_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
USAGE = Usage(3, 2, 1)
COMPLETE = Complete(2, ("stop",), USAGE)


def shape(endpoint: str = "chat", *, usage: bool = False) -> Shape:
    return Shape(endpoint, "m", 5, usage, 1, False)


def shown(*words: str) -> list[Event]:
    return [Shown(seq, Piece(0, word, (seq,))) for seq, word in enumerate(words)]


def rendered(events: Sequence[Event], of: Shape | None = None) -> bytes:
    return EventLines(Chunks("req_1", of or shape())).render(events)


@contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """Answer every POST with these bytes of a stream."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_whole_stream_has_the_bytes_that_openais_have() -> None:
    head = '"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m","choices":'
    expected = (
        f'id: 0\ndata: {{{head}[{{"index":0,"delta":{{"role":"assistant","content":"a"}},'
        f'"finish_reason":null}}]}}\n\n'
        f'id: 1\ndata: {{{head}[{{"index":0,"delta":{{"content":"b"}},"finish_reason":null}}]}}\n\n'
        f'id: 2\ndata: {{{head}[{{"index":0,"delta":{{}},"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    assert rendered([*shown("a", "b"), COMPLETE]).decode() == expected


def test_without_ids_every_event_is_one_data_line() -> None:
    chunks = Chunks("req_1", shape(usage=True))
    raw = EventLines(chunks, ids=False).render([*shown("a", "b"), COMPLETE])
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    assert len(blocks) == 5
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert raw == b"".join(
        line + b"\n\n" if line.startswith(b"data") else b""
        for line in rendered([*shown("a", "b"), COMPLETE], shape(usage=True)).splitlines()
    )


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
@given(words=st.lists(TEXTS, min_size=1, max_size=6))
def test_any_text_arrives_whole_byte_by_byte(endpoint: str, words: list[str]) -> None:
    raw = rendered([*shown(*words), COMPLETE], shape(endpoint))
    reader = Reader()
    bytewise = [event for byte in raw for event in reader.feed(bytes([byte]))]
    assert bytewise == events_of(raw)
    *parts, _, done = bytewise
    assert [event.id for event in parts] == [str(seq) for seq in range(len(words))]
    choices = [event.json["choices"][0] for event in parts]
    found = [c["delta"]["content"] if endpoint == "chat" else c["text"] for c in choices]
    assert found == words
    assert done.data == "[DONE]"


@pytest.mark.parametrize("word", ["\n\n", "\r\n", "\r", "data: x", "id: 9", "\n\ndata: [DONE]\n\n"])
def test_a_token_that_looks_like_an_event_is_one_event(word: str) -> None:
    raw = rendered(shown(word))
    assert raw.count(b"\n") == 3
    assert raw.count(b"\r") == 0
    [event] = events_of(raw)
    assert event.json["choices"][0]["delta"]["content"] == word


def test_rendering_in_one_write_or_in_many_gives_the_same_bytes() -> None:
    events = [*shown("a", "b", "c"), COMPLETE]
    lines = EventLines(Chunks("req_1", shape(usage=True)))
    assert b"".join(lines.render([event]) for event in events) == rendered(
        events, shape(usage=True)
    )


def test_the_usage_chunk_comes_after_the_finish_and_before_done() -> None:
    *_, finish, usage, done = events_of(rendered([*shown("a"), COMPLETE], shape(usage=True)))
    assert finish.json["choices"][0]["finish_reason"] == "stop"
    assert finish.json["usage"] is None
    assert (usage.id, usage.json["choices"]) == ("3", [])
    assert usage.json["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert (done.id, done.data) == (None, "[DONE]")


def test_done_comes_once_and_without_usage_nothing_speaks_of_it() -> None:
    raw = rendered([*shown("a"), COMPLETE])
    assert raw.count(DONE) == 1
    assert raw.endswith(DONE)
    assert b"usage" not in raw


@pytest.mark.parametrize(
    "message", ['a "quoted" text', "two\n\nlines\r\n", "data: [DONE]\n\n", "\u2028\x00", ""]
)
def test_an_error_is_one_data_line_without_id_or_done(message: str) -> None:
    raw = rendered([*shown("a"), Broken("engine_error", message, USAGE)])
    error = raw.split(b"\n\n", 1)[1]
    assert error.startswith(b'data: {"error":')
    assert error.count(b"\n") == 2
    assert DONE not in raw
    [_, event] = events_of(raw)
    assert event.id is None
    assert event.json == refusal_of("engine_error", message).body()


def test_an_error_event_holds_the_refusals_own_object() -> None:
    refusal = InvalidRequest("why", param="field")
    [event] = events_of(error_event(refusal))
    assert json.loads(event.data) == refusal.body()


def test_a_comment_is_no_event() -> None:
    reader = Reader()
    assert reader.feed(COMMENT) == []
    assert reader.at_end
    assert reader.comments == ["waiting"]


def test_openais_sdk_hears_no_event_in_a_comment() -> None:
    first, *rest = shown("a", "b")
    raw = COMMENT + rendered([first]) + COMMENT + rendered([*rest, COMPLETE])
    with answering(raw) as url, OpenAI(base_url=url, api_key="k", timeout=10) as sdk:
        stream = sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        assert [chunk.choices[0].delta.content for chunk in stream] == ["a", "b", None]


def test_a_token_that_shows_nothing_makes_no_event() -> None:
    events: list[Event] = [*shown("a"), Shown(1, Piece(0, "", (1,))), Shown(2, Piece(0, "b", (2,)))]
    assert [event.id for event in events_of(rendered(events))] == ["0", "2"]
