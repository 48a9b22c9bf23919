"""The typed events of a response, and the object that they add up to, as OpenAI's own types say."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from schemas.errors import StreamInterrupted
from schemas.reply import Broken, Complete, Event, Shown
from schemas.response_answers import ResponseObject
from schemas.response_events import Rendered, ResponseEvents
from schemas.responses import parse_response, repeated
from schemas.wire import Piece, Shape, TokenLogprob, TopToken, Usage

REQUEST = "req_" + "0a" * 16
STEM = "0a" * 16
USAGE = Usage(9, 4, 2)
OPENAIS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)


def shape(*, logprobs: bool = False, **body: Any) -> Shape:
    asked = parse_response(json.dumps({"model": "m", "input": "Hi"} | body).encode())
    return Shape("response", "m", 5, False, 1, logprobs, response=repeated(asked))


def pieces(*given: str | dict[str, Any]) -> list[Event]:
    """Return one event per text or delta, of one token each."""
    made = [
        Piece(0, each, (7,)) if isinstance(each, str) else Piece(0, "", (7,), None, each)
        for each in given
    ]
    return [Shown(seq, piece) for seq, piece in enumerate(made)]


def call(index: int, arguments: str, **head: str) -> dict[str, Any]:
    function = {"arguments": arguments}
    if not head:
        return {"tool_calls": [{"index": index, "function": function}]}
    own = {"index": index, "id": head["id"], "type": "function"}
    return {"tool_calls": [own | {"function": {"name": head["name"]} | function}]}


def rendered(
    events: Sequence[Event], end: Event | None = None, **body: Any
) -> tuple[list[Rendered], ResponseEvents]:
    own = ResponseEvents(REQUEST, shape(**body))
    made = own.opening()
    for event in events:
        made += own.render([event])
    made += own.render([end or Complete(len(events), ("stop",), USAGE)])
    return made, own


def bodies(made: Sequence[Rendered]) -> list[dict[str, Any]]:
    """Return the events as objects, each checked against OpenAI's types and numbered in order."""
    found = [json.loads(event.body) for event in made]
    for number, (event, body) in enumerate(zip(made, found, strict=True)):
        assert event.name == body["type"]
        assert event.seq == body["sequence_number"] == number
        OPENAIS.validate_python(body)
        if "response" in body:
            RESPONSE.validate_python(body["response"])
            msgspec.convert(body["response"], ResponseObject)
    return found


def names(made: Sequence[Rendered]) -> list[str]:
    return [event.name.removeprefix("response.") for event in made]


def test_a_text_is_one_message_in_one_part() -> None:
    made, own = rendered(pieces("Hel", "lo"))
    assert names(made) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    found = bodies(made)
    place = {"item_id": f"msg_{STEM}o0", "output_index": 0, "content_index": 0}
    for number, text in ((4, "Hel"), (5, "lo")):
        event = {"type": "response.output_text.delta", "sequence_number": number, "logprobs": []}
        assert found[number] == event | place | {"delta": text}
    assert found[6]["text"] == "Hello"
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    message = {"id": place["item_id"], "type": "message", "role": "assistant", "content": [part]}
    assert found[8]["item"] == message | {"status": "completed"}
    response = found[9]["response"]
    assert response == json.loads(own.response())
    assert response["id"] == f"resp_{STEM}"
    assert response["object"] == "response"
    assert response["created_at"] == 5
    assert response["status"] == "completed"
    assert response["output"] == [message | {"status": "completed"}]
    assert response["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


def test_the_object_repeats_its_request() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    asked = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 8,
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "previous_response_id": "resp_x",
        "prompt_cache_key": "k",
        "store": False,
        "user": "u",
    }
    made, _ = rendered(pieces("a"), **asked)
    for event in bodies(made):
        if "response" in event:
            assert {name: event["response"][name] for name in asked} == asked


def test_what_was_not_asked_has_openais_defaults() -> None:
    _, own = rendered(pieces("a"))
    response = json.loads(own.response())
    assert response["temperature"] is response["top_p"] is None  # the model's own
    assert response["tools"] == []
    assert response["tool_choice"] == "auto"
    assert response["parallel_tool_calls"] is response["store"] is True
    assert response["text"]["format"] == {"type": "text"}
    assert response["truncation"] == "disabled"
    assert response["metadata"] == {}
    assert response["error"] is response["incomplete_details"] is response["instructions"] is None


def test_a_response_in_the_background_is_queued_first() -> None:
    made, _ = rendered(pieces("a"), background=True)
    found = bodies(made)
    assert names(made)[:3] == ["created", "queued", "in_progress"]
    statuses = [event["response"]["status"] for event in found if "response" in event]
    assert statuses == ["queued", "queued", "in_progress", "completed"]


def test_an_answer_cut_at_its_length_is_incomplete() -> None:
    made, own = rendered(pieces("a"), Complete(1, ("length",), USAGE))
    assert names(made)[-1] == "incomplete"
    response = bodies(made)[-1]["response"]
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert own.status == "incomplete"


def test_an_answer_without_text_is_an_empty_message() -> None:
    made, _ = rendered([])
    [message] = bodies(made)[-1]["response"]["output"]
    assert message["content"][0]["text"] == ""


def test_calls_whose_parts_come_in_turns_are_items_of_their_own() -> None:
    events = pieces(
        "Let me see.",
        call(0, '{"a"', id="c0", name="f"),
        call(1, '{"b"', id="c1", name="g"),
        call(0, ":1}"),
        call(1, ":2}"),
    )
    made, _ = rendered(events, Complete(5, ("tool_calls",), USAGE))
    found = bodies(made)
    message, first, second = found[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert first == {
        "id": f"fc_{STEM}o1",
        "type": "function_call",
        "status": "completed",
        "call_id": "c0",
        "name": "f",
        "arguments": '{"a":1}',
    }
    assert (second["call_id"], second["name"], second["arguments"]) == ("c1", "g", '{"b":2}')
    done = [event for event in found if event["type"].endswith("arguments.done")]
    assert [event["arguments"] for event in done] == ['{"a":1}', '{"b":2}']
    assert [event["output_index"] for event in done] == [1, 2]


def test_text_between_the_parts_of_a_call_does_not_end_the_call() -> None:
    # vLLM's parsers hand over the line's end between two calls once they find nothing of a call.
    events = pieces("Hm.", call(0, '{"a"', id="c0", name="f"), "\n", call(0, ":1}"), "!")
    made, _ = rendered(events, Complete(5, ("tool_calls",), USAGE))
    found = bodies(made)
    before, called, after = found[-1]["response"]["output"]
    assert [text["content"][0]["text"] for text in (before, after)] == ["Hm.", "\n!"]
    assert (called["call_id"], called["name"], called["arguments"]) == ("c0", "f", '{"a":1}')
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == [before, called, after]


def test_what_the_model_thinks_is_an_item_before_its_answer() -> None:
    made, _ = rendered(
        pieces({"reasoning_content": "Hm"}, {"reasoning_content": "m."}, "Yes.", "!"),
        Complete(4, ("stop",), USAGE),
    )
    response = bodies(made)[-1]["response"]
    thought, message = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert thought["status"] == "completed"
    assert message["content"][0]["text"] == "Yes.!"
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_a_workers_count_of_reasoning_wins() -> None:
    made, _ = rendered(
        pieces({"reasoning": "Hm"}, "Yes."), Complete(2, ("stop",), Usage(9, 4, 0, 3))
    )
    usage = bodies(made)[-1]["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}


def test_log_probabilities_come_with_their_tokens_and_at_the_end() -> None:
    token = TokenLogprob("a", -0.5, (TopToken("b", float("-inf")),))
    event = Shown(0, Piece(0, "a", (7,), (token,)))
    made, _ = rendered([event], logprobs=True)
    found = bodies(made)
    shown = [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -9999.0, "bytes": [98]}],
        }
    ]
    assert [e["logprobs"] for e in found if e["type"] == "response.output_text.delta"] == [shown]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == shown


def test_tokens_without_text_begin_no_message_of_their_own() -> None:
    # With a reasoning parser: markup that it takes out, and half a character in a thought.
    def silent(token: str, *delta: dict[str, Any], text: str = "") -> Shown:
        logprobs = (TokenLogprob(token, -0.5, ()),)
        return Shown(0, Piece(0, text, (7,), logprobs, delta[0] if delta else None))

    events = [
        *(silent("<think>"), silent("I", {"reasoning": "I "}), silent("half")),
        *(silent("see", {"reasoning": "\u20ac."}), silent("half"), silent("Hi", text="Hi")),
        *(silent("<tool_call>"), silent("f", call(0, "{", id="c", name="f"))),
        *(silent("half"), silent("}", call(0, "}"))),
    ]
    made, _ = rendered(events, Complete(10, ("tool_calls",), USAGE), logprobs=True)
    thought, message, called = bodies(made)[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I \u20ac."}]
    [part] = message["content"]
    assert part["text"] == "Hi"
    assert [token["token"] for token in part["logprobs"]] == ["half", "Hi", "<tool_call>"]
    assert called["arguments"] == "{}"


@pytest.mark.parametrize(
    ("code", "openais"),
    [("engine_error", "server_error"), ("invalid_request", "invalid_prompt")],
)
def test_a_broken_reply_is_a_failed_response_with_what_was_made(code: str, openais: str) -> None:
    made, _ = rendered(pieces("a"), Broken(code, "Why.", USAGE))
    response = bodies(made)[-1]["response"]
    assert names(made)[-1] == response["status"] == "failed"
    assert response["error"] == {"code": openais, "message": "Why.", "type": code}
    [message] = response["output"]
    assert message["status"] == "incomplete"
    assert message["content"][0]["text"] == "a"


def test_a_cancelled_response_ends_in_an_error_that_sdks_raise() -> None:
    made, own = rendered(pieces("a"), Broken("request_cancelled", "Cancelled.", USAGE))
    assert made[-1].name == "error"
    assert made[-1].body.startswith(b'{"error":{')
    assert bodies(made)[-1]["code"] == "request_cancelled"
    assert json.loads(own.response())["status"] == "cancelled"


def test_an_interrupted_stream_ends_in_an_error_with_the_next_number() -> None:
    own = ResponseEvents(REQUEST, shape())
    made = [*own.opening(), own.error(StreamInterrupted("Resume."))]
    assert bodies(made)[-1]["error"]["code"] == "stream_interrupted"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
DELTAS = st.sampled_from(
    [
        {"reasoning": "r"},
        call(0, "{", id="c", name="f"),
        call(1, "", id="d", name="g"),
        call(0, "}"),
    ]
)


@given(st.lists(TEXTS | DELTAS, max_size=12))
def test_the_events_add_up_to_the_object_however_they_are_grouped(
    given: list[str | dict[str, Any]],
) -> None:
    events = pieces(*given)
    made, own = rendered(events)
    found = [json.loads(event.body) for event in made]
    end = Complete(len(events), ("stop",), USAGE)
    at_once = ResponseEvents(REQUEST, shape())
    assert [*at_once.opening(), *at_once.render([*events, end])] == made
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    response = json.loads(own.response())
    assert sorted(done, key=lambda item: str(item["id"])) == sorted(
        response["output"], key=lambda item: str(item["id"])
    )
    texts = "".join(each for each in given if isinstance(each, str))
    deltas = [e["delta"] for e in found if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == texts == RESPONSE.validate_python(response).output_text
