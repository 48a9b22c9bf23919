"""The items that a response is made from: checked, given ids, and as messages of a chat.

Rule: what a response put out may be put in again as it is. Reasoning is taken and not shown to the
model; what only OpenAI's own tools could make is refused.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from schemas.errors import InvalidRequest

Item = dict[str, Any]

ITEMS_MAX: Final = 4096


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    id: str | None = None


class _Call(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    arguments: str
    id: str | None = None


class _CallOutput(msgspec.Struct, frozen=True):
    call_id: str
    output: str | list[_Part]
    id: str | None = None


class _Reasoning(msgspec.Struct, frozen=True):
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None
    id: str | None = None


_Kind = TypeVar("_Kind", bound=msgspec.Struct)

_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "refusal"})


def items_of(given: str | Sequence[Item] | None, *, request: str) -> list[Item]:
    """Return a request's input as items with ids. Raises InvalidRequest naming the item."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if len(given) > ITEMS_MAX:
        raise InvalidRequest(f"'input' holds more than {ITEMS_MAX} items.", param="input")
    stem = request.removeprefix("req_")
    return [
        _item(each, f"input[{number}]", f"{stem}i{number}") for number, each in enumerate(given)
    ]


def _item(given: Item, param: str, stem: str) -> Item:
    kind = given.get("type", "message")
    match kind:
        case "message":
            return _message(_read(given, _Message, param), param, stem)
        case "function_call":
            call = _read(given, _Call, param)
            rest: Item = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
            return _named("function_call", call.id, f"fc_{stem}", rest)
        case "function_call_output":
            return _call_output(_read(given, _CallOutput, param), param, stem)
        case "reasoning":
            thought = _read(given, _Reasoning, param)
            rest = {"summary": thought.summary, "content": thought.content or []}
            return _named("reasoning", thought.id, f"rs_{stem}", rest)
    raise InvalidRequest(f"Items of type '{str(kind)[:40]}' are not served.", param=param)


def _message(message: _Message, param: str, stem: str) -> Item:
    content = _content(message, f"{param}.content")
    rest = {"role": message.role, "content": content}
    return _named("message", message.id, f"msg_{stem}", rest)


def _call_output(result: _CallOutput, param: str, stem: str) -> Item:
    output: Any = result.output
    if not isinstance(output, str):
        output = [_part(part, "input_text", f"{param}.output") for part in output]
    rest = {"call_id": result.call_id, "output": output}
    return _named("function_call_output", result.id, f"fco_{stem}", rest)


def _named(kind: str, given: str | None, made: str, rest: Item) -> Item:
    return {"id": given or made, "type": kind, "status": "completed"} | rest


def _read(given: Item, kind: type[_Kind], param: str) -> _Kind:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Invalid value for '{param}': {error}.", param=param) from None


def _content(message: _Message, param: str) -> list[Item]:
    kind = "output_text" if message.role == "assistant" else "input_text"
    if isinstance(message.content, str):
        return [_part(_Part(kind, message.content), kind, param)]
    return [_part(part, kind, param) for part in message.content]


def _part(part: _Part, kind: str, param: str) -> Item:
    if part.type not in _TEXT_PARTS:
        raise InvalidRequest(
            f"Content of type '{part.type[:40]}' cannot be served: only text can.", param=param
        )
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.refusal or ""}
    if part.text is None:
        raise InvalidRequest(f"Invalid value for '{param}': a part without text.", param=param)
    if kind == "output_text":
        return {"type": kind, "text": part.text, "annotations": []}
    return {"type": kind, "text": part.text}


def messages_of(items: Sequence[Item], *, instructions: str | None) -> list[Item]:
    """Return checked items as the messages of a chat, after the instructions."""
    messages: list[Item] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "message":
                _add_message(messages, item)
            case "function_call":
                _add_call(messages, item)
            case "function_call_output":
                output = item["output"]
                text = output if isinstance(output, str) else _texts(output)
                call_id = item["call_id"]
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
    return messages


def _texts(parts: Sequence[Item]) -> Any:
    texts = [part.get("text") or part.get("refusal") or "" for part in parts]
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _add_message(messages: list[Item], item: Item) -> None:
    """Add a message, or its text to the assistant's message whose calls have yet to be answered:
    one answer said both, and the tools' results must follow their calls."""
    content = _texts(item["content"])
    if item["role"] != "assistant" or not messages or "tool_calls" not in messages[-1]:
        messages.append({"role": item["role"], "content": content})
        return
    before = messages[-1]["content"] or ""
    if isinstance(before, str) and isinstance(content, str):
        messages[-1]["content"] = before + content
    else:
        messages[-1]["content"] = [*_parts(before), *_parts(content)]


def _parts(content: Any) -> list[Item]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _add_call(messages: list[Item], item: Item) -> None:
    """Add a call to the assistant's message that it belongs to, or to one of its own."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    call = {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }
    messages[-1].setdefault("tool_calls", []).append(call)
