"""A stream as its client reads it: tokens and usage, and the ways in which it ends early."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, NamedTuple

import msgspec

from chaos.http import Answer, Cut

INTERRUPTED: Final = "stream_interrupted"


class Token(NamedTuple):
    """An event that holds text."""

    seq: int
    text: str


class Used(NamedTuple):
    """What the answer says it took."""

    tokens: int


class Interrupted(Exception):
    """A node ended the stream, which can be resumed."""


class Ended(Exception):
    """The request ended otherwise than with its last token; holds code and message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


async def events(answer: Answer, *, silence_s: float) -> AsyncGenerator[Token | Used, None]:
    """Yield what a stream says until [DONE].

    Raises Cut when it breaks or nothing, not even a comment, comes for `silence_s`; Interrupted and
    Ended for an error event.
    """
    seq = -1
    async with aclosing(answer.lines(silence_s=silence_s)) as lines:
        async for line in lines:
            name, _, value = line.partition(b": ")
            if name == b"id":
                seq = int(value)
            if name != b"data":
                continue
            if value == b"[DONE]":
                return
            chunk = msgspec.json.decode(value)
            if "error" in chunk:
                raise failure(chunk["error"])
            for part in _parts(chunk, seq):
                yield part
    raise Cut("the stream ended without [DONE]")


def _parts(chunk: dict[str, Any], seq: int) -> list[Token | Used]:
    parts: list[Token | Used] = []
    for choice in chunk["choices"]:
        text = choice.get("text") or choice.get("delta", {}).get("content")
        if text:
            parts.append(Token(seq, text))
    if usage := chunk.get("usage"):
        parts.append(Used(usage["completion_tokens"]))
    return parts


def failure(error: dict[str, Any]) -> Interrupted | Ended:
    """Return what an error of the API's shape means to who reads a stream."""
    if error["code"] == INTERRUPTED:
        return Interrupted(error["message"])
    return Ended(str(error["code"]), error["message"])
