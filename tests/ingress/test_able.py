"""What an engine cannot do is refused by the field's name, never ignored."""

import json
from typing import Any

import pytest

from ingress.able import check_able
from schemas.errors import InvalidRequest
from schemas.model import ModelCard
from schemas.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion

SIM = ModelCard(name="m", created_s=1, max_model_len=9, files={}, simulated=True)
PLAIN = ModelCard(name="m", created_s=1, max_model_len=9, files={})
PARSING = ModelCard(name="m", created_s=1, max_model_len=9, files={}, tool_parser="hermes")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
HOOK = {"tool_calls": [{"name": "f", "arguments": ["{}"]}]}


def chat(**more: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | more
    return parse_chat(json.dumps(body).encode())


def completion(**more: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "x"} | more).encode())


@pytest.mark.parametrize(
    ("card", "change", "param"),
    [
        (SIM, {"response_format": {"type": "json_object"}}, "response_format"),
        (SIM, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (SIM, {"response_format": {"type": "json_object"}, "sim": HOOK}, "response_format"),
        (SIM, {"bad_words": ["a"]}, "bad_words"),
        (SIM, {"allowed_token_ids": [5]}, "allowed_token_ids"),
        (SIM, {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        (SIM, {"tools": TOOLS, "tool_choice": TOOLS[0]}, "tool_choice"),
        (PLAIN, {"sim": {}}, "sim"),
        (PARSING, {"sim": {}}, "sim"),
        (PLAIN, {"n": 2, "temperature": 0}, "n"),
        (PLAIN, {"tools": TOOLS}, "tools"),
        (PLAIN, {"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
        (PLAIN, {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ],
    ids=str,
)
def test_what_the_engine_cannot_do_is_refused(
    card: ModelCard, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_able(chat(**change), card)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("card", "change"),
    [
        (SIM, {"tools": TOOLS}),
        (SIM, {"tools": TOOLS, "tool_choice": "none"}),
        (SIM, {"tools": TOOLS, "tool_choice": "required", "sim": HOOK}),
        (SIM, {"tools": TOOLS, "tool_choice": TOOLS[0], "sim": HOOK}),
        (SIM, {"response_format": {"type": "text"}, "bad_words": []}),
        (SIM, {"response_format": {"type": "json_object"}, "sim": {"pieces": ["{}"]}}),
        (SIM, {"n": 2, "temperature": 0}),
        (PLAIN, {"n": 2, "temperature": 0.1}),
        (PLAIN, {"tools": TOOLS, "tool_choice": "none"}),
        (PLAIN, {"response_format": {"type": "json_object"}, "bad_words": ["a"]}),
        (PARSING, {"tools": TOOLS, "tool_choice": "required"}),
        (PARSING, {"tools": TOOLS}),
    ],
    ids=str,
)
def test_what_the_engine_can_do_is_taken(card: ModelCard, change: dict[str, Any]) -> None:
    check_able(chat(**change), card)


def test_a_completion_is_held_to_the_same() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_able(completion(structured_outputs={"choice": ["a"]}), SIM)
    assert refused.value.param == "structured_outputs"
    check_able(completion(structured_outputs={"choice": ["a"]}), PLAIN)
