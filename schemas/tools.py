"""The tools a model may call, and whether it may, must, or must not."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from schemas.errors import InvalidRequest

TOOLS_MAX: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")

FunctionName = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")]


class FunctionDefinition(msgspec.Struct, frozen=True):
    """A function; `parameters` is the JSON schema of an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool; only functions can be served."""

    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates and vLLM's parsers are given it."""
        function = self.function
        strict = {} if function.strict is None else {"strict": function.strict}
        return {
            "type": self.type,
            "function": {
                "name": function.name,
                "description": function.description,
                "parameters": function.parameters,
                **strict,
            },
        }


class FunctionChoice(msgspec.Struct, frozen=True):
    """The function that must be called."""

    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionChoice


Tools = Annotated[list[Tool], Meta(min_length=1, max_length=TOOLS_MAX)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Check what the types cannot say. Raises InvalidRequest naming the member."""
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}].function"
        if not _NAME.fullmatch(tool.function.name):  # a pattern's `$` allows a line's end
            raise InvalidRequest("A function's name has only a-z, A-Z, 0-9, _ and -.", param=where)
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise InvalidRequest(
                "A function's parameters are the JSON schema of an object.",
                param=f"{where}.parameters",
            )
    if choice in (None, "none"):
        return
    if not tools:
        raise InvalidRequest("'tool_choice' needs 'tools'.", param="tool_choice")
    if isinstance(choice, NamedTool):
        names = {tool.function.name for tool in tools}
        if choice.function.name not in names:
            raise InvalidRequest("'tool_choice' names none of the 'tools'.", param="tool_choice")
