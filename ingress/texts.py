"""What a client says, as texts: what a moderator is shown, and what is logged of a prompt.

Rule: whatever of a request the model reads and the client wrote is in it: the turns of every role,
their names, reasoning and tool calls with their ids, the tools, the documents and variables of the
template, their numbers too.
"""

from collections.abc import Iterator
from typing import Any

from ingress.prompt import Prompter
from ingress.turns import plain_turn
from schemas.conversation import ChatMessage
from schemas.openai import ChatRequest, CompletionRequest, tools_plain


def texts_of(ask: ChatRequest | CompletionRequest, prompter: Prompter) -> tuple[str, ...]:
    """Return the texts of a request; a prompt of token ids is decoded, which takes long."""
    if isinstance(ask, CompletionRequest):
        return (ask.text if ask.tokens is None else prompter.decode(ask.tokens),)
    found = [text for message in ask.messages for text in _of_message(message)]
    found += _strings(tools_plain(ask.tools))
    found += _strings(ask.chat_template_kwargs)
    found += _strings(ask.documents)
    return tuple(text for text in found if text)


def _of_message(message: ChatMessage) -> Iterator[str]:
    plain = plain_turn(message)
    yield plain["content"]
    yield message.refusal or ""
    yield message.reasoning or message.reasoning_content or ""
    yield message.name or ""
    yield message.tool_call_id or ""
    for call, read in zip(message.tool_calls or (), plain.get("tool_calls", ()), strict=False):
        yield call.id or ""
        yield call.function.name
        arguments = call.function.arguments
        if isinstance(arguments, str):
            yield arguments
        if not isinstance(arguments, str) or "\\" in arguments:
            yield from _strings(read["function"]["arguments"])  # escapes hide nothing


def _strings(value: Any) -> Iterator[str]:
    """Yield every string and number of a JSON value, names of members too."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                yield text
            case bool():
                pass
            case int() | float() as number:
                yield str(number)
            case dict(members):
                waiting += [*reversed(members.values()), *reversed(members)]
            case list(items):
                waiting += reversed(items)
