"""A whole reply as one object: the same text as the stream's."""

from typing import Any

import pytest

from schemas.reply import Complete, Shown
from schemas.wire import Piece, Shape, TokenLogprob, Usage
from streamer.collect import Collected

USAGE = Usage(3, 4, 2)


def answer(endpoint: str, pieces: list[Piece], reasons: tuple[str, ...], **more: Any) -> Any:
    options = {"include_usage": False, "choices": len(reasons), "logprobs": False} | more
    collected = Collected("req_1", Shape(endpoint, "m", 5, **options))
    for seq, piece in enumerate(pieces):
        collected.add(Shown(seq, piece))
    return collected.answer(Complete(len(pieces), reasons, USAGE))


def test_a_chat_is_openais_object() -> None:
    assert answer("chat", [Piece(0, "a", (1,)), Piece(0, "b", (2,))], ("stop",)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_completion_is_openais_object() -> None:
    found = answer("completion", [Piece(0, "a", (1,)), Piece(0, "b", (2,))], ("length",))
    assert found["object"] == "text_completion"
    assert found["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}
    ]


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_three_choices_keep_their_own_text_and_reason(endpoint: str) -> None:
    pieces = [Piece(choice, f"{choice}{k}", (k,)) for k in range(2) for choice in (2, 0, 1)]
    found = answer(endpoint, pieces, ("stop", "length", "stop"))["choices"]
    assert [choice["index"] for choice in found] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in found] == ["stop", "length", "stop"]
    texts = [c["message"]["content"] if endpoint == "chat" else c["text"] for c in found]
    assert texts == ["0001", "1011", "2021"]


def call(index: int, arguments: str, **head: Any) -> Piece:
    function = {"arguments": arguments} | ({"name": head.pop("name")} if "name" in head else {})
    delta = {"tool_calls": [{"index": index, "function": function} | head]}
    return Piece(0, "", (1,), None, delta)


def test_parallel_tool_calls_join_each_to_its_own() -> None:
    pieces = [
        call(0, "", id="c0", name="f", type="function"),
        call(1, '{"b"', id="c1", name="g", type="function"),
        call(0, '{"a":'),
        call(1, ":2}"),
        call(0, "1}"),
    ]
    [choice] = answer("chat", pieces, ("tool_calls",))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c1", "type": "function", "function": {"name": "g", "arguments": '{"b":2}'}},
    ]


def test_text_before_tool_calls_is_kept() -> None:
    pieces = [Piece(0, "Let me see.", (1,)), call(0, "{}", id="c", name="f")]
    [choice] = answer("chat", pieces, ("tool_calls",))["choices"]
    assert choice["message"]["content"] == "Let me see."


def test_an_empty_chat_has_an_empty_string() -> None:
    [choice] = answer("chat", [], ("stop",))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_reasoning_is_gathered_beside_the_content() -> None:
    pieces = [Piece(0, "", (1,), None, {"reasoning": word}) for word in ("Let ", "me see.")]
    [choice] = answer("chat", [*pieces, Piece(0, "4", (2,))], ("stop",))["choices"]
    assert choice["message"]["reasoning"] == "Let me see."
    assert choice["message"]["content"] == "4"


def test_reasoning_alone_has_no_content_and_is_counted() -> None:
    collected = Collected("req_1", Shape("chat", "m", 5, False, 1, False))
    collected.add(Shown(0, Piece(0, "", (1,), None, {"reasoning": "Hm"})))
    found = collected.answer(Complete(1, ("length",), Usage(9, 4, 0, 3)))
    message = found["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "Hm")
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_an_echo_stands_before_each_choice() -> None:
    collected = Collected("req_1", Shape("completion", "m", 5, False, 2, False, echo="Once "))
    for choice, text in ((0, "a"), (1, "b"), (1, "c")):
        collected.add(Shown(0, Piece(choice, text, (1,))))
    found = collected.answer(Complete(3, ("stop", "stop"), USAGE))["choices"]
    assert [choice["text"] for choice in found] == ["Once a", "Once bc"]


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_log_probabilities_of_all_tokens_are_gathered(endpoint: str) -> None:
    pieces = [
        Piece(0, word, (1,), (TokenLogprob(word, value, ()),))
        for word, value in (("a", -1.0), ("b", float("-inf")))
    ]
    [choice] = answer(endpoint, pieces, ("stop",), logprobs=True)["choices"]
    if endpoint == "chat":
        found = [token["logprob"] for token in choice["logprobs"]["content"]]
    else:
        found = choice["logprobs"]["token_logprobs"]
    assert found == [-1.0, -9999.0]
