"""What clients send: bad input names its field, null is the default, parts are text."""

import json
from typing import Any

import pytest

from schemas.errors import InvalidRequest
from schemas.openai import parse_chat, parse_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
SHARED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 2**70}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options"),
    ({"stream_options": {}}, "stream_options"),
    ({"user": 5}, "user"),
    ({"session_id": 5}, "session_id"),
    ({"sim": {"pieces": "abc"}}, "sim"),
    ({"sim": {"piece": []}}, "sim"),
    ({"sim": {"fail_at": 2**70}}, "sim"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    *SHARED,
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    *SHARED,
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
]


def _param(parse: Any, body: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequest) as refused:
        parse(json.dumps(body).encode())
    assert refused.value.status == 400
    assert refused.value.param is not None, refused.value.message
    return refused.value.param


@pytest.mark.parametrize(("change", "param"), CHATS, ids=lambda value: str(value)[:50])
def test_a_bad_chat_request_names_its_field(change: dict[str, Any], param: str) -> None:
    found = _param(parse_chat, CHAT | change)
    assert found == param or found.startswith((f"{param}.", f"{param}["))


@pytest.mark.parametrize(("change", "param"), COMPLETIONS, ids=lambda value: str(value)[:50])
def test_a_bad_completion_request_names_its_field(change: dict[str, Any], param: str) -> None:
    found = _param(parse_completion, COMPLETION | change)
    assert found == param or found.startswith((f"{param}.", f"{param}["))


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field: str) -> None:
    assert _param(parse_chat, {k: v for k, v in CHAT.items() if k != field}) == field


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"nul", b"\xff", b'{"model":NaN}', b'{"max_tokens":Infinity}'),
        *(b'{"model":"\xff"}', b'{"model":"\\ud800"}', b"[" * 100_000, b'{"x":' * 100_000),
    ],
    ids=lambda raw: str(raw[:30]),
)
def test_what_is_no_json_is_refused_without_a_param(raw: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidRequest) as refused:
            parse(raw)
        assert refused.value.param is None


@pytest.mark.parametrize(
    "raw",
    [b"[]", b"5", b'"x"', b"null", b"{}x", b'{"messages":' * 100_000, b'{"temperature":1e999}'],
    ids=lambda raw: str(raw[:30]),
)
def test_what_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(raw)


def test_null_is_the_default_of_every_field() -> None:
    plain = parse_chat(json.dumps(CHAT).encode())
    nulls = dict.fromkeys(set(plain.__struct_fields__) - set(CHAT))
    assert parse_chat(json.dumps(CHAT | nulls).encode()) == plain
    bare = parse_completion(json.dumps(COMPLETION).encode())
    nulls = dict.fromkeys(set(bare.__struct_fields__) - set(COMPLETION))
    assert parse_completion(json.dumps(COMPLETION | nulls).encode()) == bare


def test_unknown_fields_have_no_effect() -> None:
    plain = parse_chat(json.dumps(CHAT).encode())
    assert parse_chat(json.dumps(CHAT | {"stored": [1], "": None}).encode()) == plain


@pytest.mark.parametrize(
    "change",
    [
        *({"temperature": 0}, {"temperature": 2}, {"top_p": 1}, {"n": 128}, {"seed": -(2**63)}),
        *({"seed": 2**63 - 1}, {"max_tokens": 1}, {"stop": []}, {"stop": ["a"] * 4}),
        *({"presence_penalty": -2}, {"frequency_penalty": 2}, {"logit_bias": {"0": -100}}),
        {"stream": True, "stream_options": {"include_usage": None}},
    ],
    ids=str,
)
def test_the_ends_of_a_range_are_in_it(change: dict[str, Any]) -> None:
    asked = parse_chat(json.dumps(CHAT | change).encode())
    [(field, value)] = list(change.items())[-1:]
    if field != "stream_options":
        assert getattr(asked, field) == value


def test_only_text_parts_can_be_served() -> None:
    for kind in ("image_url", "input_audio", "file", ""):
        messages = [CHAT["messages"][0], {"role": "user", "content": [{"type": kind}]}]
        assert _param(parse_chat, CHAT | {"messages": messages}) == "messages[1].content"


def test_the_newer_bound_on_the_answer_wins() -> None:
    both = CHAT | {"max_tokens": 5, "max_completion_tokens": 7}
    assert parse_chat(json.dumps(both).encode()).output_tokens == 7
    assert parse_chat(json.dumps(CHAT | {"max_tokens": 5}).encode()).output_tokens == 5
    assert parse_chat(json.dumps(CHAT).encode()).output_tokens is None
    assert parse_completion(json.dumps(COMPLETION).encode()).output_tokens == 16


@pytest.mark.parametrize(
    ("stop", "stops"),
    [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())],
)
def test_stops_are_a_tuple_whatever_their_form(stop: Any, stops: tuple[str, ...]) -> None:
    assert parse_chat(json.dumps(CHAT | {"stop": stop}).encode()).stops == stops


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ("x", None, "x"),
        (["x"], None, "x"),
        ([1, 2], [1, 2], ""),
        ([[1, 2]], [1, 2], ""),
        ([7], [7], ""),
    ],
)
def test_a_prompt_is_text_or_token_ids(prompt: Any, tokens: list[int] | None, text: str) -> None:
    asked = parse_completion(json.dumps({"model": "m", "prompt": prompt}).encode())
    assert asked.tokens == tokens
    if tokens is None:
        assert asked.text == text


def test_a_session_may_be_named_in_two_ways() -> None:
    for field in ("session_id", "prompt_cache_key"):
        assert parse_chat(json.dumps(CHAT | {field: "s"}).encode()).session == "s"
    assert parse_chat(json.dumps(CHAT).encode()).session is None
