"""What the API calls the events of a reply."""

import json
import math
from typing import Any

import pytest

from schemas.logprobs import finite
from schemas.wire import Piece, Shape, TokenLogprob, TopToken, Usage
from streamer.chunks import Chunks, answer_id, logprobs_of


def shape(endpoint: str, *, usage: bool = False, choices: int = 1, logprobs: bool = False) -> Shape:
    return Shape(endpoint, 'm"odel', 5, usage, choices, logprobs)


def said(raw: bytes | None) -> dict[str, Any]:
    assert raw is not None
    found: dict[str, Any] = json.loads(raw)
    return found


def test_a_chats_first_chunk_of_each_choice_brings_the_role() -> None:
    chunks = Chunks("req_1", shape("chat", choices=2))
    deltas = [
        said(chunks.piece(Piece(choice, "a", (1,))))["choices"][0]["delta"]
        for choice in (0, 0, 1, 1)
    ]
    first, next_ = {"role": "assistant", "content": "a"}, {"content": "a"}
    assert deltas == [first, next_, first, next_]


def test_a_chunk_names_its_choice() -> None:
    chunks = Chunks("req_1", shape("completion", choices=3))
    found = [said(chunks.piece(Piece(c, "a", (1,))))["choices"][0]["index"] for c in (2, 0, 1)]
    assert found == [2, 0, 1]


@pytest.mark.parametrize(
    ("endpoint", "kind", "prefix"),
    [("chat", "chat.completion.chunk", "chatcmpl-"), ("completion", "text_completion", "cmpl-")],
)
def test_every_chunk_has_the_answers_head(endpoint: str, kind: str, prefix: str) -> None:
    chunks = Chunks("req_1", shape(endpoint, usage=True))
    raws = [chunks.piece(Piece(0, word, (1,))) for word in "ab"]
    raws += [chunks.finish(("stop",)), chunks.usage(Usage(1, 2, 0))]
    for raw in raws:
        chunk = said(raw)
        assert chunk["id"] == f"{prefix}1"
        assert (chunk["object"], chunk["created"], chunk["model"]) == (kind, 5, 'm"odel')


def test_the_fast_way_and_the_whole_way_agree() -> None:
    plain, whole = Chunks("req_1", shape("completion")), Chunks("req_1", shape("completion"))
    piece = Piece(0, 'te"xt\n', (1,))
    assert said(plain.piece(piece)) == said(whole.piece(piece._replace(delta={"x": 1}))) | {}


def test_an_empty_piece_makes_no_chunk() -> None:
    for endpoint in ("chat", "completion"):
        assert Chunks("req_1", shape(endpoint)).piece(Piece(0, "", (1,))) is None


def test_an_empty_chat_still_says_who_spoke() -> None:
    finish = said(Chunks("req_1", shape("chat")).finish(("stop",)))
    assert finish["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    ]


def test_a_choice_that_speaks_first_opens_those_before_it() -> None:
    # OpenAI's helper appends what it does not know: out of order it raises IndexError.
    chunks = Chunks("req_1", shape("chat", choices=3))
    spoken = [said(chunks.piece(Piece(choice, "a", (1,)))) for choice in (1, 0, 2)]
    opened = {"role": "assistant", "content": ""}
    found = [[(one["index"], one["delta"]) for one in chunk["choices"]] for chunk in spoken]
    first = {"role": "assistant", "content": "a"}
    assert found == [[(0, opened), (1, first)], [(0, {"content": "a"})], [(2, first)]]


def test_the_finish_says_why_each_choice_ended() -> None:
    finish = said(Chunks("req_1", shape("completion", choices=2)).finish(("stop", "length")))
    assert finish["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "text": "", "logprobs": None, "finish_reason": "length"},
    ]


def test_usage_is_there_only_where_it_was_asked_for() -> None:
    asked, not_asked = Chunks("r", shape("chat", usage=True)), Chunks("r", shape("chat"))
    assert not_asked.usage(Usage(1, 2, 0)) is None
    assert "usage" not in said(not_asked.piece(Piece(0, "a", (1,))))
    for _ in range(2):
        assert said(asked.piece(Piece(0, "a", (1,))))["usage"] is None
    assert said(asked.usage(Usage(1, 2, 0)))["usage"]["total_tokens"] == 3


def test_a_tool_calls_delta_stands_beside_no_content() -> None:
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    chunks = Chunks("req_1", shape("chat"))
    first = said(chunks.piece(Piece(0, "", (1,), None, delta)))["choices"][0]["delta"]
    assert first == {"role": "assistant"} | delta
    second = said(chunks.piece(Piece(0, "", (1,), None, delta)))["choices"][0]["delta"]
    assert second == delta


@pytest.mark.parametrize("logprob", [-math.inf, math.inf, math.nan])
def test_a_log_probability_is_always_finite(logprob: float) -> None:
    assert finite(logprob) == -9999.0
    assert finite(-0.25) == -0.25


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_minus_infinity_is_no_infinity_in_a_chunk(endpoint: str) -> None:
    tops = (TopToken("b", -0.5), TopToken("c", -math.inf))
    piece = Piece(0, "é", (1,), (TokenLogprob("é", -math.inf, tops),))
    raw = Chunks("req_1", shape(endpoint, logprobs=True)).piece(piece)
    logprobs = said(raw)["choices"][0]["logprobs"]
    if endpoint == "chat":
        [token] = logprobs["content"]
        assert (token["token"], token["logprob"], token["bytes"]) == ("é", -9999.0, [0xC3, 0xA9])
        assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -9999.0]
    else:
        assert logprobs["token_logprobs"] == [-9999.0]
        assert logprobs["top_logprobs"] == [{"b": -0.5, "c": -9999.0, "é": -9999.0}]
    assert b"Infinity" not in (raw or b"")


def test_a_completions_chosen_token_is_always_among_the_likeliest() -> None:
    # OpenAI's reference: "there may be up to `logprobs+1` elements in the response".
    tokens = (TokenLogprob("a", -3.0, (TopToken("b", -0.5),)), TokenLogprob("c", -1.0, ()))
    tokens += (TokenLogprob("d", -0.25, (TopToken("d", -0.25),)),)
    likeliest = logprobs_of([Piece(0, "acd", (1, 2, 3), tokens)], chat=False)["top_logprobs"]
    assert likeliest == [{"b": -0.5, "a": -3.0}, {"c": -1.0}, {"d": -0.25}]


def test_a_completions_offsets_count_characters() -> None:
    pieces = [Piece(0, word, (1,), (TokenLogprob(word, -1.0, ()),)) for word in ("é", "ab", "c")]
    assert logprobs_of(pieces, chat=False)["text_offset"] == [0, 1, 3]


def test_an_answers_id_holds_the_requests() -> None:
    assert answer_id("req_ab", shape("chat")) == "chatcmpl-ab"
    assert answer_id("req_ab", shape("completion")) == "cmpl-ab"


def test_an_echo_stands_before_the_first_text_of_each_choice() -> None:
    chunks = Chunks("req_1", shape("completion", choices=2)._replace(echo="Once "))
    texts = [
        said(chunks.piece(Piece(choice, text, (1,))))["choices"][0]["text"]
        for choice, text in ((0, "upon"), (0, " a"), (1, ""), (1, "more"))
    ]
    assert texts == ["Once upon", " a", "Once ", "more"]
    assert [choice["text"] for choice in said(chunks.finish(("stop", "stop")))["choices"]] == [
        "",
        "",
    ]


def test_an_echo_of_an_empty_answer_comes_with_its_end() -> None:
    chunks = Chunks("req_1", shape("completion")._replace(echo="Once"))
    assert said(chunks.finish(("stop",)))["choices"][0]["text"] == "Once"


def test_reasoning_stands_beside_no_content() -> None:
    chunks = Chunks("req_1", shape("chat"))
    delta = said(chunks.piece(Piece(0, "", (1,), None, {"reasoning": "Hm"})))["choices"][0]["delta"]
    assert delta == {"role": "assistant", "reasoning": "Hm"}
    both = said(chunks.piece(Piece(0, "So", (1,), None, {"reasoning": "."})))["choices"][0]
    assert both["delta"] == {"content": "So", "reasoning": "."}
