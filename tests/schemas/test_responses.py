"""What clients send to /v1/responses: bad input names its field; underneath it is a chat."""

import json
from typing import Any

import pytest

from schemas import fields, refused
from schemas.errors import InvalidRequest
from schemas.extras import Extras
from schemas.openai import ChatRequest, parse_chat
from schemas.responses import as_chat, own_words, parse_response, request_of, response_id
from schemas.subjects import new_request_id

REQUEST = "req_" + "0a" * 16
BODY: dict[str, Any] = {"model": "m", "input": "x"}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}

FORM = {"type": "json_object"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0]"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {f"{number}": "b" for number in range(17)}}, "metadata"),
    ({"include": ["nonsense"]}, "include"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"truncation": "none"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, {"type": "file_search"}]}, "tools[1].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"background": True, "store": False}, "background"),
    ({"background": "yes"}, "background"),
    ({"generate": False}, "generate"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"service_tier": "cheap"}, "service_tier"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"user": 5}, "user"),
    ({"sim": {"pieces": "abc"}}, "sim.pieces"),
    ({"sim": {"piece": []}}, "sim"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a"}, "text": {"format": FORM}}, "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": "required"},
        "tool_choice",
    ),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"bad_words": [""]}, "bad_words"),
    ({"priority": -1}, "priority"),
    ({"include_reasoning": 0}, "include_reasoning"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"documents": {}}, "documents"),
]


def chat_of(**more: Any) -> ChatRequest:
    request = parse_response(json.dumps(BODY | more).encode())
    return as_chat(request, request.items(REQUEST))


def test_what_the_object_says_of_tools_where_there_are_none_may_be_asked_for() -> None:
    assert chat_of(tool_choice="auto", tools=[]).choice == "none"


def chat(**more: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m"} | more).encode(), streamed=True)


@pytest.mark.parametrize(("more", "param"), REFUSED)
def test_bad_input_names_its_field(more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat_of(**more)
    assert refusal.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "m", "input": NaN}', b"\xff"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_response(body)


def test_null_is_the_default_and_unknown_fields_have_no_effect() -> None:
    nulls = {name: None for more, _ in REFUSED for name in more if name not in ("model", "input")}
    assert chat_of(**nulls, unknown=5) == chat_of()


def test_a_text_is_a_user_s_message_and_instructions_stand_before_it() -> None:
    assert chat_of() == chat(messages=[{"role": "user", "content": "x"}])
    assert chat_of(instructions="Be brief.") == chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "x"},
        ]
    )


def test_fields_are_those_of_a_chat_under_other_names() -> None:
    own = chat_of(
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.5,
        top_logprobs=3,
        tools=[TOOL],
        prompt_cache_key="k",
        seed=7,
        on_disconnect="continue",
        sim={"pieces": ["a"]},
    )
    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    assert own == chat(
        messages=[{"role": "user", "content": "x"}],
        max_completion_tokens=5,
        temperature=0.5,
        top_p=0.5,
        logprobs=True,
        top_logprobs=3,
        tools=[{"type": "function", "function": function}],
        prompt_cache_key="k",
        seed=7,
        on_disconnect="continue",
        sim={"pieces": ["a"]},
    )
    assert chat_of(include=["message.output_text.logprobs"]).alternatives == 0
    assert chat_of().alternatives is None


AS_IN_A_CHAT: dict[str, Any] = {
    "seed": 7,
    "stop": ["a", "b"],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": -1.5},
    "structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": " "},
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "min_tokens": 3,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "bad_words": ["a"],
    "allowed_token_ids": [1, 2],
    "add_special_tokens": True,
    "priority": 3,
    "session_id": "s",
    "on_disconnect": "continue",
    "sim": {"pieces": ["a", {"hex": "ff"}], "ttft_ms": 1.5},
    "include_reasoning": False,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"a": [1, None, {"b": 0.5}]},
    "documents": [{"title": "t"}],
}


def test_what_a_chat_is_asked_in_vllms_words_or_ours_a_response_is_asked_in_the_same() -> None:
    assert AS_IN_A_CHAT.keys() == set(fields.AS_IN_A_CHAT)
    plain = chat(messages=[{"role": "user", "content": "x"}])
    for name in AS_IN_A_CHAT:
        assert getattr(plain, name) is None
    own = chat_of(**AS_IN_A_CHAT)
    assert own == chat(messages=[{"role": "user", "content": "x"}], **AS_IN_A_CHAT)


def test_every_field_that_a_chat_shares_with_a_response_is_served_or_refused_by_both() -> None:
    for name in Extras.__struct_fields__:
        assert (name in fields.AS_IN_A_CHAT) != (name in refused.SHARED), name


@pytest.mark.parametrize("field", refused.RESPONSE)
def test_a_field_that_no_response_can_have_is_refused_unless_it_asks_for_nothing(
    field: str,
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat_of(**{field: {"a": 1}})
    assert refusal.value.param == field
    for nothing in (None, False, refused.DEFAULTS.get(field)):
        assert chat_of(**{field: nothing}) == chat_of(**{field: None})


def test_a_form_of_the_answer_is_a_chats() -> None:
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    own = chat_of(text={"format": {"type": "json_schema"} | schema})
    form = {"type": "json_schema", "json_schema": schema}
    assert own == chat(messages=[{"role": "user", "content": "x"}], response_format=form)
    assert own.structured is not None


def test_calls_and_their_outputs_are_the_turns_of_a_chat() -> None:
    own = chat_of(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "[]"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "rain"}],
            },
        ]
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "[]"}},
    ]
    assert own == chat(
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        ]
    )


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("I look.", "!", "I look.!"),
        (None, "Wait.", "Wait."),
        (["I", "look."], "!", ["I", "look.", "!"]),
    ],
)
def test_text_after_calls_does_not_part_them_from_their_results(
    before: str | list[str] | None, after: str, said: str | list[str]
) -> None:
    # An assistant's second message in a row is refused by many chat templates.
    def parts(text: str | list[str]) -> str | list[dict[str, str]]:
        return text if isinstance(text, str) else [{"type": "text", "text": each} for each in text]

    own = chat_of(
        input=[
            {"role": "user", "content": "Weather?"},
            *([] if before is None else [{"role": "assistant", "content": parts(before)}]),
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"role": "assistant", "content": after},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        ]
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert own == chat(
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": parts(said), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        ]
    )


def test_items_have_ids_of_their_own_or_new_ones() -> None:
    body = {
        "input": [{"role": "user", "content": "a"}, {"id": "m", "role": "user", "content": "b"}]
    }
    first, second = parse_response(json.dumps(BODY | body).encode()).items(REQUEST)
    assert first == {
        "id": f"msg_{'0a' * 16}i0",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "a"}],
    }
    assert second["id"] == "m"


def test_what_is_put_in_again_stays_as_it_is() -> None:
    items = parse_response(json.dumps(BODY).encode()).items(REQUEST)
    again = parse_response(json.dumps(BODY | {"input": items}).encode())
    assert again.items(new_request_id()) == items


def test_a_previous_response_needs_no_input() -> None:
    body = {"model": "m", "previous_response_id": "resp_1"}
    assert parse_response(json.dumps(body).encode()).items(REQUEST) == []


@pytest.mark.parametrize(
    ("chats", "own"),
    [
        (None, None),
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("tools[1].function.name", "tools[1].name"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("reasoning_effort", "reasoning.effort"),
        ("temperature", "temperature"),
    ],
)
def test_a_refusal_of_a_chat_is_put_into_a_response_s_words(
    chats: str | None, own: str | None
) -> None:
    refused = own_words(InvalidRequest(f"Why '{chats}'.", param=chats))
    assert (refused.param, refused.message) == (own, f"Why '{own}'.")


def test_ids_of_requests_and_responses_are_made_from_each_other() -> None:
    request = new_request_id()
    assert request_of(response_id(request)) == request
    for other in ("", "resp_", "resp_0", request, response_id(request).upper(), "resp_" + "g" * 32):
        assert request_of(other) is None
