"""Every field does what docs/api.md says, over the whole path; what cannot be had is a 400."""

import json
from typing import Any

import openai
import pytest

from tests.pipeline.asking import CHAT, COMPLETIONS, chat, collect, hook, refusal, stream
from tests.pipeline.conftest import System

ARGUMENTS = json.dumps({"city": "Paris", "days": [1, 2], "note": 'a "b" \\ ü'})
CALLS = [{"name": "weather", "arguments": [ARGUMENTS[at : at + 4] for at in range(0, 48, 4)]}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
CALLS[0]["arguments"].append(ARGUMENTS[48:])  # type: ignore[attr-defined]
PATHS = [CHAT, COMPLETIONS]


def body_of(path: str, text: str = "Name a river.", **more: Any) -> dict[str, Any]:
    return chat(text, **more) if path == CHAT else {"model": "sim", "prompt": text} | more


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", PATHS)
def test_fields_without_an_effect_on_the_text_are_taken(system: System, path: str) -> None:
    neutral: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -100},
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "priority": 3,
        "response_format": {"type": "text"},
    }
    with system.client() as client:
        plain = collect(client, body_of(path, seed=4), path)
        more = collect(client, body_of(path, seed=4, **neutral), path)
    assert [text_of(choice) for choice in more["choices"]] == [
        text_of(choice) for choice in plain["choices"]
    ]
    for count in ("prompt_tokens", "completion_tokens"):
        assert more["usage"][count] == plain["usage"][count]


@pytest.mark.parametrize("path", PATHS)
def test_the_length_of_an_answer_has_two_ends(system: System, path: str) -> None:
    with system.client() as client:
        whole = collect(client, body_of(path, max_tokens=500), path)
        assert whole["choices"][0]["finish_reason"] == "stop"
        wanted = whole["usage"]["completion_tokens"] + 9
        more = collect(client, body_of(path, max_tokens=500, min_tokens=wanted), path)
        over = client.post(path, json=body_of(path, max_tokens=5, min_tokens=6))
    assert more["usage"]["completion_tokens"] == wanted
    assert text_of(more["choices"][0]).startswith(text_of(whole["choices"][0]))
    assert over.status_code == 400
    assert refusal(over)["param"] == "min_tokens"


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_string_may_stay_in_the_text(system: System, path: str) -> None:
    body = body_of(path, stop=["<END>"], sim=hook("one ", "two <E", "ND> three"))
    with system.client() as client:
        without = collect(client, body, path)["choices"][0]
        kept = collect(client, body | {"include_stop_str_in_output": True}, path)["choices"][0]
        parts = stream(client, body | {"include_stop_str_in_output": True}, path)
    assert text_of(without) == "one two "
    assert text_of(kept) == parts.text() == "one two <END>"
    assert without["finish_reason"] == kept["finish_reason"] == "stop"


def test_an_echo_is_the_prompt_before_each_choice_in_both_modes(system: System) -> None:
    prompt = "Once upon a time 🙂\n"
    plain = {"model": "sim", "prompt": prompt, "n": 2, "max_tokens": 6, "seed": 2}
    with system.client() as client:
        answers = collect(client, plain, COMPLETIONS)
        echoed = collect(client, plain | {"echo": True}, COMPLETIONS)
        parts = stream(client, plain | {"echo": True}, COMPLETIONS)
        ids = collect(client, plain | {"echo": True, "prompt": [[40, 50, 60]]}, COMPLETIONS)
    texts = [prompt + choice["text"] for choice in answers["choices"]]
    assert [choice["text"] for choice in echoed["choices"]] == texts
    assert [parts.text(index) for index in range(2)] == texts
    assert echoed["usage"]["completion_tokens"] == answers["usage"]["completion_tokens"]
    assert ids["usage"]["prompt_tokens"] == 3
    first, second = (choice["text"] for choice in ids["choices"])
    assert first != second
    assert first[:3] == second[:3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 0}, "logprobs"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
    ids=str,
)
def test_what_a_completion_cannot_have_is_400(
    system: System, body: dict[str, Any], param: str
) -> None:
    with system.client() as client:
        answer = client.post(COMPLETIONS, json=body_of(COMPLETIONS) | body)
    assert answer.status_code == 400, answer.text
    assert refusal(answer)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, None),
        ({"tools": []}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection"),
    ],
    ids=str,
)
def test_what_a_chat_cannot_have_is_400(
    system: System, body: dict[str, Any], param: str | None
) -> None:
    with system.client() as client:
        answer = client.post(CHAT, json=chat() | body)
        begun = client.post(CHAT, json=chat(stream=True) | body)
    for refused in (answer, begun):
        assert refused.status_code == 400, refused.text
        assert refusal(refused)["param"] == (param or "tool_choice")


@pytest.mark.parametrize("choice", [None, "auto", "required", {"function": {"name": "weather"}}])
def test_a_tool_call_in_pieces_joins_to_valid_json(system: System, choice: Any) -> None:
    if isinstance(choice, dict):
        choice = {"type": "function"} | choice
    body = chat(tools=[TOOL], tool_choice=choice, sim={"pieces": ["Hm. "], "tool_calls": CALLS})
    with system.client() as client:
        whole = collect(client, body)["choices"][0]
        parts = stream(client, body)
    [call] = whole["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == json.loads(ARGUMENTS)
    assert call["function"]["name"] == "weather"
    assert whole["message"]["content"] == parts.text() == "Hm. "
    assert whole["finish_reason"] == "tool_calls"
    assert parts.reasons() == {0: "tool_calls"}


def test_with_n_choices_each_has_its_own_tool_calls(system: System) -> None:
    body = chat(tools=[TOOL], n=2, sim={"tool_calls": CALLS})
    with system.client() as client:
        choices = collect(client, body)["choices"]
        parts = stream(client, body)
    assert parts.reasons() == {0: "tool_calls", 1: "tool_calls"}
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 2
    for choice in choices:
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert arguments == ARGUMENTS


def test_a_conversation_with_all_roles_and_a_tool_call_is_a_prompt(system: System) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "And the weather?", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [_called(ARGUMENTS)]},
        {"role": "tool", "content": [{"type": "text", "text": "rain"}], "tool_call_id": "call_1"},
    ]
    spaced = json.dumps(json.loads(ARGUMENTS), indent=2)
    again = [*turns[:2], {**turns[2], "tool_calls": [_called(spaced)]}, turns[3]]
    with system.client() as client:
        first = collect(client, {"model": "sim", "messages": turns, "max_tokens": 9})
        second = collect(client, {"model": "sim", "messages": again, "max_tokens": 9})
        fewer = collect(client, {"model": "sim", "messages": turns[:2], "max_tokens": 9})
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens"] > fewer["usage"]["prompt_tokens"]


def _called(arguments: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function}


def test_tools_are_part_of_the_prompt(system: System) -> None:
    with system.client() as client:
        bare = collect(client, chat(max_tokens=2))["usage"]["prompt_tokens"]
        told = collect(client, chat(max_tokens=2, tools=[TOOL]))["usage"]["prompt_tokens"]
        none = chat(max_tokens=2, tools=[TOOL], tool_choice="none")
        assert collect(client, none)["usage"]["prompt_tokens"] == told > bare


def test_the_official_sdk_gathers_a_streamed_tool_call(system: System) -> None:
    with openai.OpenAI(
        base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as sdk:
        messages: list[Any] = [{"role": "user", "content": "The weather?"}]
        tools: list[Any] = [TOOL]
        with sdk.chat.completions.stream(
            model="sim",
            messages=messages,
            tools=tools,
            extra_body={"sim": {"tool_calls": CALLS}},
        ) as events:
            answer = events.get_final_completion()
    [call] = answer.choices[0].message.tool_calls or ()
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("path", PATHS)
def test_log_probabilities_are_finite_and_equal_in_both_modes(system: System, path: str) -> None:
    asked: dict[str, Any] = {"logprobs": 3} if path == COMPLETIONS else {"logprobs": True}
    asked |= {"top_logprobs": 3} if path == CHAT else {}
    with system.client() as client:
        [whole] = collect(client, body_of(path, max_tokens=12, **asked), path)["choices"]
        parts = stream(client, body_of(path, max_tokens=12, **asked), path)
    found = [chunk["choices"][0].get("logprobs") for chunk in parts.chunks]
    if path == CHAT:
        streamed = [token for each in found if each for token in each["content"]]
        assert streamed == whole["logprobs"]["content"]
        assert all(len(token["top_logprobs"]) == 3 for token in streamed)
    else:
        streamed = [value for each in found if each for value in each["token_logprobs"]]
        assert streamed == whole["logprobs"]["token_logprobs"]
        offsets = [offset for each in found if each for offset in each["text_offset"]]
        assert offsets == whole["logprobs"]["text_offset"] == sorted(set(offsets))
    assert len(streamed) == 12
