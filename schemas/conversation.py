"""The turns of a conversation, as clients send them. Rule: only text can be served."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from schemas.errors import InvalidRequest

TEXT_PARTS = ("text", "refusal")


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; only text can be served."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """The part's text, whichever member holds it."""
        return self.refusal if self.type == "refusal" else self.text


class CalledFunction(msgspec.Struct, frozen=True):
    """A function that the model called before; `arguments` is JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledTool(msgspec.Struct, frozen=True):
    """A tool call of an earlier turn."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Check what the types cannot say. Raises InvalidRequest naming the member."""
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        for part in message.content if isinstance(message.content, list) else ():
            if part.type not in TEXT_PARTS:
                raise InvalidRequest(
                    f"Content of type '{part.type[:40]}' cannot be served: only text can.",
                    param=f"{where}.content",
                )
            if part.words is None:
                raise InvalidRequest(
                    f"A part of type '{part.type}' lacks its text.", param=f"{where}.content"
                )
        if message.content is None and not _speaks_otherwise(message):
            raise InvalidRequest(
                f"A message of the role '{message.role}' needs content.", param=f"{where}.content"
            )
        if message.role == "tool" and message.tool_call_id is None:
            raise InvalidRequest(
                "A message of the role 'tool' needs the id of its call.",
                param=f"{where}.tool_call_id",
            )


def _speaks_otherwise(message: ChatMessage) -> bool:
    """Whether an assistant's message says something besides content."""
    said = message.tool_calls or message.refusal or message.reasoning or message.reasoning_content
    return message.role == "assistant" and bool(said)
