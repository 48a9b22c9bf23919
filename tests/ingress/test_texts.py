"""What of a request a moderator is shown: whatever the client wrote and the model reads."""

import json
from typing import Any

import pytest

from ingress.admit import parse
from ingress.prompt import Prompter
from ingress.texts import texts_of
from workers.sim.vocabulary import tokenizer_files


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(tokenizer_files())


def chat_texts(prompter: Prompter, **more: Any) -> tuple[str, ...]:
    body = {"model": "m", "messages": [{"role": "user", "content": "u"}]} | more
    return texts_of(parse(json.dumps(body).encode(), chat=True), prompter)


def test_turns_of_every_role_are_shown(prompter: Prompter) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "u1"}, {"type": "text", "text": "u2"}],
        },
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]},
        {"role": "tool", "content": "t", "tool_call_id": "c"},
        {"role": "user", "content": "u3", "name": "n"},
    ]
    found = chat_texts(prompter, messages=messages)
    assert found == ("s", "d", "u1\nu2", "r", "c", "f", '{"a": "b"}', "t", "c", "u3", "n")


def test_tools_documents_and_variables_are_shown(prompter: Prompter) -> None:
    function = {
        "name": "f",
        "description": "does it",
        "parameters": {"type": "object", "properties": {"p": {"enum": ["e1", "e2"]}}},
    }
    found = chat_texts(
        prompter,
        tools=[{"type": "function", "function": function}],
        documents=[{"title": "doc", "card": 4111111111111111}],
        chat_template_kwargs={"k": "v", "number": 5.25, "yes": True, "none": None},
    )
    assert {"u", "f", "does it", "p", "e1", "e2", "doc", "k", "v"} <= set(found)
    assert {"4111111111111111", "5.25"} <= set(found)
    assert not {"True", "1", "None"} & set(found)


def test_arguments_given_as_an_object_are_shown(prompter: Prompter) -> None:
    call = {"function": {"name": "f", "arguments": {"a": ["b", {"c": "d"}, 7]}}}
    found = chat_texts(prompter, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert found == ("f", "a", "b", "c", "d", "7")


def test_escapes_in_arguments_hide_nothing(prompter: Prompter) -> None:
    call = {"function": {"name": "f", "arguments": r'{"a": "\u0062ad"}'}}
    found = chat_texts(prompter, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert found == ("f", r'{"a": "\u0062ad"}', "a", "bad")


@pytest.mark.parametrize("whole", [True, False])
def test_a_prompt_is_shown_whatever_its_form(prompter: Prompter, whole: bool) -> None:
    text = "Once upon a time"
    prompt: Any = text if whole else prompter.text(text, special=False)
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    [found] = texts_of(parse(body, chat=False), prompter)
    assert found == text
