"""Turns as chat templates know them, and conversations whose last message is continued."""

import json
from typing import Any

import msgspec
import pytest

from ingress.prompt import Prompter
from ingress.turns import plain_turn, plain_turns
from schemas.errors import InvalidRequest
from schemas.openai import ChatMessage, parse_chat
from tests.ingress.test_prompt import FILES, templated

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turn(**message: Any) -> dict[str, Any]:
    return plain_turn(msgspec.convert(message, ChatMessage))


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}} | more
    [found] = turn(role="assistant", tool_calls=[call])["tool_calls"]
    return dict(found)


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        ('{"a": [1, "b"]}', {"a": [1, "b"]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("no JSON", {}),
        ("[1]", {}),
        ("[" * 100_000, {}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_tool_calls_arguments_are_an_object(arguments: Any, known: dict[str, Any]) -> None:
    assert called(arguments)["function"] == {"name": "f", "arguments": known}


def test_a_tool_call_keeps_its_id_and_needs_none() -> None:
    assert list(called("{}", id="call_1")) == ["id", "function", "type"]
    assert "id" not in called("{}")


def test_a_turn_has_only_the_members_of_its_role() -> None:
    assert turn(role="user", content="x", tool_call_id="c") == {"role": "user", "content": "x"}
    assert turn(role="assistant", content="x", tool_calls=[]) == {
        "role": "assistant",
        "content": "x",
    }
    assert turn(role="tool", content="4", tool_call_id="c") == {
        "role": "tool",
        "content": "4",
        "tool_call_id": "c",
    }
    assert turn(role="developer", content="x", name="Ann")["name"] == "Ann"


def test_reasoning_stands_under_both_of_its_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        found = turn(role="assistant", content="x", **{name: "because"})
        assert (found["reasoning"], found["reasoning_content"]) == ("because", "because")


def test_a_refusal_is_content() -> None:
    assert turn(role="assistant", refusal="no")["content"] == "no"
    part = {"type": "refusal", "refusal": "no"}
    assert turn(role="assistant", content=[part])["content"] == "no"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_several_parts_are_lines_without_empty_ones() -> None:
    for role in ("system", "user", "assistant"):
        assert turn(role=role, content=parts("a", "", "b"))["content"] == "a\nb"


def test_a_template_that_wants_parts_gets_parts_but_for_tools() -> None:
    def content(**message: Any) -> Any:
        return plain_turn(msgspec.convert(message, ChatMessage), parts=True)["content"]

    assert content(role="user", content=parts("a", "", "b")) == parts("a", "", "b")
    assert content(role="user", content="a") == parts("a")
    assert content(role="user", content="") == parts("")
    assert content(role="assistant", refusal="no") == parts("no")
    assert content(role="assistant", tool_calls=[{"function": {"name": "f"}}]) == []
    tool = {"role": "tool", "tool_call_id": "c"}
    assert content(content=parts("a", "", "b"), **tool) == "a\n\nb"


def test_where_developers_are_unknown_the_system_speaks_once_and_first() -> None:
    said = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "developer", "content": parts("c", "d")},
    ]
    messages = msgspec.convert(said, list[ChatMessage])
    for wants_parts in (False, True):
        found = plain_turns(messages, parts=wants_parts, developers=False)
        assert [each["role"] for each in found] == ["system", "user"]
        assert found[0]["content"] == "a\n\nc\nd"
    [alone] = plain_turns(messages[2:], developers=False)
    assert alone == {"role": "system", "content": "c\nd"}
    assert [each["role"] for each in plain_turns(messages)] == ["system", "user", "developer"]
    apart = plain_turns([messages[0], messages[1], messages[0]], developers=False)
    assert [each["role"] for each in apart] == ["system", "user", "system"]


def ids(prompter: Prompter, *turns: dict[str, str], **more: Any) -> list[int]:
    body = {"model": "m", "messages": list(turns)} | more
    return prompter.of_chat(parse_chat(json.dumps(body).encode()))


USER = {"role": "user", "content": "Name a river."}
BEGUN = {"role": "assistant", "content": "The river "}
CONTINUED: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}


def test_a_continued_message_has_no_end() -> None:
    prompter = templated(CHATML)
    found = ids(prompter, USER, BEGUN, **CONTINUED)
    assert found == prompter.text("<user>Name a river.</><assistant>The river ")


def test_a_template_that_strips_messages_can_be_continued() -> None:
    prompter = templated(CHATML.replace("m.content", "m.content | trim"))
    found = ids(prompter, USER, BEGUN, **CONTINUED)
    assert found == prompter.text("<user>Name a river.</><assistant>The river")


def test_a_template_that_drops_the_last_message_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest) as refused:
        ids(templated("{{ messages[0].content }}"), USER, BEGUN, **CONTINUED)
    assert refused.value.param == "continue_final_message"


def test_without_a_generation_prompt_the_conversation_ends_with_its_last_message() -> None:
    prompter = templated(CHATML)
    found = ids(prompter, USER, add_generation_prompt=False)
    assert found == prompter.text("<user>Name a river.</>")


def test_the_templates_further_variables_reach_it() -> None:
    prompter = templated("{{ thinking }}{{ reasoning_effort }}{{ documents }}")
    found = ids(
        prompter,
        USER,
        chat_template_kwargs={"thinking": "yes"},
        reasoning_effort="low",
        documents=[{"a": 1}],
    )
    assert found == prompter.text("yeslow[{'a': 1}]")


def test_tools_and_documents_that_are_not_given_are_none_to_the_template() -> None:
    prompter = templated("{{ tools is none }}{{ documents is none }}{{ thinking is defined }}")
    assert ids(prompter, USER) == prompter.text("TrueTrueFalse")


def test_tools_and_their_calls_are_rendered() -> None:
    prompter = Prompter(FILES)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"q":1}'}}
    turns: list[Any] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    plain = ids(prompter, *turns)
    assert len(ids(prompter, *turns, tools=[tool])) > len(plain)
    call["function"]["arguments"] = '{"q":2}'  # type: ignore[index]
    assert ids(prompter, *turns) != plain
