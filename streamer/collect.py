"""A whole reply as one JSON object, for `stream: false`. Rule: the same text as the stream's."""

from collections.abc import Sequence
from typing import Any

from schemas.reply import Complete, Shown
from schemas.wire import Piece, Shape
from streamer.chunks import answer_id, logprobs_of, usage_of


class Collected:
    """Gathers the pieces of one reply until it is whole."""

    def __init__(self, request: str, shape: Shape) -> None:
        self._request = request
        self._shape = shape
        self._pieces: list[list[Piece]] = [[] for _ in range(shape.choices)]

    def add(self, event: Shown) -> None:
        """Take the next piece."""
        self._pieces[event.piece.choice].append(event.piece)

    def answer(self, complete: Complete) -> dict[str, Any]:
        """Return the API's object for the whole reply."""
        chat = self._shape.endpoint == "chat"
        choice = self._chat_choice if chat else self._text_choice
        return {
            "id": answer_id(self._request, self._shape),
            "object": "chat.completion" if chat else "text_completion",
            "created": self._shape.created_s,
            "model": self._shape.model,
            "choices": [choice(index, reason) for index, reason in enumerate(complete.reasons)],
            "usage": usage_of(complete.usage),
        }

    def _chat_choice(self, index: int, reason: str) -> dict[str, Any]:
        pieces = self._pieces[index]
        text = "".join(piece.text for piece in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := "".join((piece.delta or {}).get("reasoning") or "" for piece in pieces):
            message["reasoning"] = reasoning
            message["content"] = text or None
        if calls := _tool_calls(pieces):
            message["tool_calls"] = calls
            message["content"] = text or None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs_of(pieces, chat=True) if self._shape.logprobs else None,
            "finish_reason": reason,
        }

    def _text_choice(self, index: int, reason: str) -> dict[str, Any]:
        pieces = self._pieces[index]
        return {
            "index": index,
            "text": self._shape.echo + "".join(piece.text for piece in pieces),
            "logprobs": logprobs_of(pieces, chat=False) if self._shape.logprobs else None,
            "finish_reason": reason,
        }


def _tool_calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Join the deltas of tool calls: what comes first stays, arguments are appended."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        for delta in (piece.delta or {}).get("tool_calls", ()):
            call = calls.setdefault(
                delta["index"],
                {"id": None, "type": "function", "function": {"name": None, "arguments": ""}},
            )
            function = delta.get("function", {})
            call["id"] = delta.get("id", call["id"])
            call["function"]["name"] = function.get("name", call["function"]["name"])
            call["function"]["arguments"] += function.get("arguments", "")
    return [calls[index] for index in sorted(calls)]
