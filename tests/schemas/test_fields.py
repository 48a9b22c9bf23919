"""Fields beyond the plain ones: tools, forms, messages of all roles, and what is refused."""

import json
from typing import Any

import pytest

from schemas import refused
from schemas.errors import InvalidRequest
from schemas.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from schemas.tools import NamedTool
from schemas.wire import Structured

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**more: Any) -> ChatRequest:
    return parse_chat(json.dumps(CHAT | more).encode())


def completion(**more: Any) -> CompletionRequest:
    return parse_completion(json.dumps(COMPLETION | more).encode())


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def turn(role: str, **more: Any) -> dict[str, Any]:
    return {"messages": [CHAT["messages"][0], {"role": role} | more]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": [tool()] * 129}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [tool("")]}, "tools[0].function"),
    ({"tools": [tool("a b")]}, "tools[0].function"),
    ({"tools": [tool("a\n")]}, "tools[0].function"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": named("f")}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (turn("assistant"), "messages[1].content"),
    (turn("user"), "messages[1].content"),
    (turn("developer", content=None), "messages[1].content"),
    (turn("tool", content="4"), "messages[1].tool_call_id"),
    (turn("function", content="4", name="f"), "messages[1].role"),
    (turn("user", content=[{"type": "text"}]), "messages[1].content"),
    (turn("assistant", tool_calls=[{"id": "c"}]), "messages[1].tool_calls[0]"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    (
        {"tools": [tool()], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
    ),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ({"bad_words": [""]}, "bad_words"),
    ({"priority": -1}, "priority"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"prediction": "x"}, "prediction"),
    ({"prompt_cache_options": True}, "prompt_cache_options"),
    ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"store": "yes"}, "store"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs.add_generation_prompt",
    ),
]


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_served_is_refused_by_its_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat(**change)
    found = refusal.value.param
    assert found is not None, refusal.value.message
    assert found == param or found.startswith((f"{param}.", f"{param}["))


@pytest.mark.parametrize("field", refused.CHAT)
def test_a_field_that_no_chat_can_have_is_refused_unless_it_asks_for_nothing(field: str) -> None:
    default = refused.DEFAULTS.get(field)
    for value in (True, 0, "x", [1], {"a": 1}):
        if value == default:
            continue
        with pytest.raises(InvalidRequest) as refusal:
            chat(**{field: value})
        assert refusal.value.param == field
    for nothing in (None, False, default):
        assert chat(**{field: nothing}).model == "m"


@pytest.mark.parametrize("field", refused.COMPLETION)
def test_a_field_that_no_completion_can_have_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        completion(**{field: "x"})
    assert refusal.value.param == field
    for nothing in (None, refused.DEFAULTS.get(field)):
        assert completion(**{field: nothing}).model == "m"


def test_a_completion_s_stream_is_not_obfuscated_either() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        completion(stream=True, stream_options={"include_obfuscation": True})
    assert refusal.value.param == "stream_options"


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [tool("get_weather-2", description="d", parameters=SCHEMA, strict=True)]},
        {"tools": [tool(parameters={})], "tool_choice": named("f"), "parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"metadata": {"a": "b"}, "store": True, "user": "u", "safety_identifier": "s"},
        {"service_tier": "auto"},
        {"prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"modalities": ["text"], "reasoning_effort": "none", "verbosity": "low"},
        {"top_k": -1, "min_p": 0, "repetition_penalty": 1.2, "min_tokens": 0, "priority": 7},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        turn("assistant", content=None, tool_calls=[{"id": "c", **tool(arguments="{}")}]),
        turn("assistant", refusal="no"),
        turn("assistant", content=[{"type": "refusal", "refusal": "no"}]),
        turn("tool", content=[{"type": "text", "text": "4"}], tool_call_id="c"),
        turn("developer", content="Be brief."),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_can_be_served_is_taken(change: dict[str, Any]) -> None:
    assert chat(**change).model == "m"


def test_with_tools_the_choice_is_auto_unless_named() -> None:
    assert chat().choice == "none"
    assert chat(tools=[tool()]).choice == "auto"
    assert chat(tools=[tool()], tool_choice=None).choice == "auto"
    assert chat(tools=[tool()], tool_choice="none").choice == "none"
    choice = chat(tools=[tool()], tool_choice=named("f")).choice
    assert isinstance(choice, NamedTool)
    assert choice.function.name == "f"


def test_a_tool_is_plain_as_vllm_dumps_it() -> None:
    [bare] = chat(tools=[tool()]).tools or ()
    assert bare.plain() == {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": None},
    }
    [full] = chat(tools=[tool(parameters=SCHEMA, strict=False, more=1)]).tools or ()
    assert full.plain()["function"] == {
        "name": "f",
        "description": None,
        "parameters": SCHEMA,
        "strict": False,
    }


@pytest.mark.parametrize(
    ("change", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structured(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                }
            },
            Structured(json='{"type":"object"}'),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            Structured(structural_tag='{"type":"structural_tag","format":{"type":"any_text"}}'),
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, Structured(json='{"a":1}')),
        ({"structured_outputs": {"json": "{}"}}, Structured(json="{}")),
        ({"structured_outputs": {"json_object": True}}, Structured(json_object=True)),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structured(choice=("a", "b"))),
        (
            {"structured_outputs": {"regex": "a+", "whitespace_pattern": " "}},
            Structured(regex="a+", whitespace_pattern=" "),
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_form_is_asked_for_in_two_ways(change: dict[str, Any], form: Structured | None) -> None:
    assert chat(**change).structured == form
    assert completion(**change).structured == form


def test_the_templates_variables_are_those_of_vllm() -> None:
    assert chat().variables == {}
    assert chat(reasoning_effort="none").variables == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    own = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert own.variables == {"reasoning_effort": "low", "enable_thinking": False, "x": 1}
    assert chat(documents=[{"title": "t"}]).variables == {"documents": [{"title": "t"}]}
