"""Members of a large body: small but for the prompt, and refused before they are decoded."""

import json
from typing import Any, cast

import pytest
from msgspec import inspect

from schemas.errors import InvalidRequest, RequestTooLarge
from schemas.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from schemas.responses import ResponseRequest, parse_response
from schemas.sizes import MEMBER_BYTES_MAX

MANY = MEMBER_BYTES_MAX // 4
LARGE: dict[str, Any] = {
    "logit_bias": {str(number): 1 for number in range(MANY)},
    "stop": ["a"] * MANY,
    "stop_token_ids": [1234] * MANY,
    "metadata": {str(number): "" for number in range(MANY)},
    "response_format": {"type": "json_object", "schema": [1234] * MANY},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1234] * MANY}}}],
    "chat_template_kwargs": {"a": [1234] * MANY},
    "prediction": {"type": "content", "content": [1234] * MANY},
}
PARSERS: dict[type[Any], Any] = {
    ChatRequest: parse_chat,
    CompletionRequest: parse_completion,
    ResponseRequest: parse_response,
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_member_over_the_limit_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestTooLarge, match=f"'{name}'.*{MEMBER_BYTES_MAX}") as refused:
        parse_chat(json.dumps(CHAT | {name: LARGE[name]}).encode())
    assert refused.value.param == name


def test_a_response_s_members_are_bounded_too() -> None:
    body = {"model": "m", "input": "x", "metadata": LARGE["metadata"]}
    with pytest.raises(RequestTooLarge) as refused:
        parse_response(json.dumps(body).encode())
    assert refused.value.param == "metadata"


PROMPTS = {"messages", "documents", "input", "sim"}
"""What is read as it is, beside `prompt`."""


def _holds_much(found: Any) -> bool:
    if isinstance(found, inspect.AnyType | inspect.ListType | inspect.DictType):
        return True
    return isinstance(found, inspect.UnionType) and any(map(_holds_much, found.types))


UNTYPED = [
    (kind, field.name)
    for kind in (ChatRequest, CompletionRequest, ResponseRequest)
    for field in cast("inspect.StructType", inspect.type_info(kind)).fields
    if _holds_much(field.type) and field.name not in PROMPTS | {"prompt"}
]


@pytest.mark.parametrize(("kind", "name"), UNTYPED)
def test_no_member_is_decoded_because_nobody_thought_of_it(kind: type[Any], name: str) -> None:
    """Those that are refused, and those that stand unread in a response, took a second."""
    members = b'{"model": "m", "%b": [%b0]}' % (name.encode(), b"0," * (MEMBER_BYTES_MAX // 2))
    with pytest.raises(RequestTooLarge) as refused:
        PARSERS[kind](members)
    assert refused.value.param == name


def test_a_large_text_in_place_of_a_number_is_refused_for_what_it_is() -> None:
    body = {"model": "m", "input": "x", "image": "a" * 2 * MEMBER_BYTES_MAX}
    with pytest.raises(InvalidRequest, match="'image' is not served") as refused:
        parse_response(json.dumps(body).encode())
    assert refused.value.status == 400


def test_a_prompt_may_be_as_large_as_a_body() -> None:
    text = "a" * 5_000_000
    messages = [{"role": "user", "content": text}]
    assert (
        parse_chat(json.dumps(CHAT | {"messages": messages}).encode()).messages[0].content == text
    )
    assert parse_completion(json.dumps({"model": "m", "prompt": text}).encode()).text == text
    ids = list(range(1_000_000))
    assert parse_completion(json.dumps({"model": "m", "prompt": ids}).encode()).tokens == ids


def test_a_prompt_of_many_lists_is_not_taken_apart() -> None:
    body = json.dumps({"model": "m", "prompt": [[1234] * 5] * (MANY // 5)}).encode()
    with pytest.raises(InvalidRequest) as refused:
        parse_completion(body)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("body", [b"[" * 2_000_000, b'{"a":' * 500_000, b"\xff" * 2_000_000])
def test_a_large_body_that_is_no_object_is_refused_as_a_small_one_is(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(body)
