"""Members of a large body: small but for the prompt, and refused before they are decoded."""

import json
from typing import Any, Final

import msgspec
import pytest

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
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
READ: Final[dict[type[msgspec.Struct], Any]] = {
    ChatRequest: parse_chat,
    CompletionRequest: parse_completion,
    ResponseRequest: parse_response,
}
PROMPTS = {"messages", "prompt", "input", "instructions", "documents"}
FLAT = tuple(
    getattr(msgspec.inspect, f"{name}Type")
    for name in ("None", "Bool", "Int", "Float", "Str", "Literal")
)


def nested(kind: type[msgspec.Struct]) -> list[str]:
    """Return the fields of a request that are decoded whatever lists and objects they hold."""
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    found = []
    for each in described.fields:
        of = each.type
        types = of.types if isinstance(of, msgspec.inspect.UnionType) else (of,)
        if not all(isinstance(one, FLAT) for one in types):
            found.append(each.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_member_over_the_limit_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestTooLarge, match=f"'{name}'.*{MEMBER_BYTES_MAX}") as refused:
        parse_chat(json.dumps(CHAT | {name: LARGE[name]}).encode())
    assert refused.value.param == name


@pytest.mark.parametrize("kind", READ)
def test_every_member_that_may_hold_a_list_is_bounded(kind: type[msgspec.Struct]) -> None:
    members = set(nested(kind)) - PROMPTS
    assert {"sim", "tools" if kind is not CompletionRequest else "stop"} <= members
    many = json.dumps([1234] * MANY)
    for name in members:
        with pytest.raises(RequestTooLarge) as refused:
            READ[kind](f'{{"model": "m", "{name}": {many}}}'.encode())
        assert refused.value.param == name


def test_a_response_s_members_are_bounded_too() -> None:
    body = {"model": "m", "input": "x", "metadata": LARGE["metadata"]}
    with pytest.raises(RequestTooLarge) as refused:
        parse_response(json.dumps(body).encode())
    assert refused.value.param == "metadata"


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
