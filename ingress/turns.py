"""The turns of a conversation as chat templates know them. Pure.

As vLLM prepares them: content is one string, or a list of parts where the template loops over it;
absent members are absent, a tool call's arguments are an object, an assistant's reasoning stands
under both of its names, and a developer is the system where the template knows none.
"""

import json
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from schemas.conversation import CalledTool, ChatMessage
from schemas.errors import InvalidRequest

_OPEN_END: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class Ending(Enum):
    """How a rendered conversation ends."""

    ANSWER = "with the beginning of an answer"
    OPEN = "within its last message, which the answer continues"
    NONE = "with its last message"


def plain_turns(
    messages: Sequence[ChatMessage], *, parts: bool = False, developers: bool = True
) -> list[dict[str, Any]]:
    """Return messages as a template knows them: with `parts` content is a list, without
    `developers` the system speaks in their place."""
    turns = [plain_turn(message, parts=parts) for message in messages]
    if developers or not any(turn["role"] == "developer" for turn in turns):
        return turns
    for turn in turns:
        if turn["role"] == "developer":
            turn["role"] = "system"
    return _system_first(turns)


def plain_turn(message: ChatMessage, *, parts: bool = False) -> dict[str, Any]:
    """Return a message as templates know it."""
    texts = _texts(message)
    content: str | list[dict[str, str]]
    if not parts:
        content = "\n".join(text for text in texts if text)
    elif message.role == "tool":  # one string to every template
        content = "\n".join(texts)
    else:
        content = [{"type": "text", "text": text} for text in texts]
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "assistant":
        if message.tool_calls:
            plain["tool_calls"] = [_call(call) for call in message.tool_calls]
        reasoning = message.reasoning or message.reasoning_content
        if reasoning is not None:
            plain["reasoning"] = plain["reasoning_content"] = reasoning
    elif message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _texts(message: ChatMessage) -> list[str]:
    content = message.content
    if isinstance(content, list):
        return [part.words or "" for part in content]
    text = content or message.refusal or content
    return [] if text is None else [text]


def _system_first(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge what the system says into one turn before all others: some templates demand that."""
    system = [turn for turn in turns if turn["role"] == "system"]
    if len(system) == 1 and turns[0] is system[0]:
        return turns
    texts = [_joined(turn["content"]) for turn in system]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(turn for turn in turns if turn["role"] != "system")]


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _call(call: CalledTool) -> dict[str, Any]:
    # In the order of vLLM's server: a template may dump the call as it is.
    function = {"arguments": _arguments(call.function.arguments), "name": call.function.name}
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "function": function, "type": call.type}


def _arguments(given: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments as an object. What is none is an empty one, as in vLLM: it stands in the
    past, and refusing it would refuse every later turn too."""
    if isinstance(given, dict):
        return given
    try:
        read = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def open_end(turns: list[dict[str, Any]]) -> None:
    """Mark the end of the last turn's content, to be found again once it is rendered."""
    last = turns[-1]
    if isinstance(last["content"], str):
        last["content"] += _OPEN_END
    elif last["content"]:
        last["content"][-1]["text"] += _OPEN_END
    else:
        last["content"] = [{"type": "text", "text": _OPEN_END}]


def cut_open(text: str) -> str:
    """Cut a rendered conversation at the mark, as Hugging Face's `continue_final_message` does.

    Raises InvalidRequest where the template dropped it.
    """
    end = text.rfind(_OPEN_END.strip())
    if end < 0:
        raise InvalidRequest(
            "The model's chat template does not show the last message.",
            param="continue_final_message",
        )
    if text[end:].startswith(_OPEN_END):
        return text[:end]
    return text[:end].rstrip()  # the template strips messages
