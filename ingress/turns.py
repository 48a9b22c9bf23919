"""The turns of a conversation as chat templates know them. Pure.

As vLLM prepares them: content is one string, absent members are absent, a tool call's arguments are
an object, and an assistant's reasoning stands under both of its names.
"""

import json
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


def plain_turn(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates know it."""
    plain: dict[str, Any] = {"role": message.role, "content": _content(message)}
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


def _content(message: ChatMessage) -> str:
    content = message.content
    if isinstance(content, list):
        return "\n".join(part.words or "" for part in content)
    return content or message.refusal or ""


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
    turns[-1]["content"] += _OPEN_END


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
