"""What the API calls the events of a reply. Rule: a pure function of the reply's shape and events,
so that a replay is equal byte for byte.

Objects as OpenAI documents them: `chat.completion.chunk`, `chat.completion`, `text_completion`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.logprobs import finite, logprob_of
from schemas.wire import Piece, Shape, TokenLogprob, Usage

_json = msgspec.json.Encoder().encode


class Chunks:
    """Renders the chunks of one streamed reply."""

    def __init__(self, request: str, shape: Shape) -> None:
        self._chat = shape.endpoint == "chat"
        self._logprobs = shape.logprobs
        self._roles_due = set(range(shape.choices)) if self._chat else set()
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far
        self._echo = shape.echo
        self._echoes_due = set(range(shape.choices)) if shape.echo else set()
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = _json(
            {
                "id": answer_id(request, shape),
                "object": kind,
                "created": shape.created_s,
                "model": shape.model,
            }
        )
        self._head = head[:-1]
        usage = b',"usage":null' if shape.include_usage else b""
        self._include_usage = shape.include_usage
        opening = b',"choices":[{"index":%d,'
        member = b'"delta":{"content":' if self._chat else b'"text":'
        self._before = [self._head + opening % choice + member for choice in range(shape.choices)]
        close = b"}" if self._chat else b""
        logprobs = b"" if self._chat else b',"logprobs":null'
        self._after = close + logprobs + b',"finish_reason":null}]' + usage + b"}"
        self._tail = usage + b"}"

    def piece(self, piece: Piece) -> bytes | None:
        """Return the chunk of a piece; None for one that shows nothing."""
        choice = piece.choice
        if choice in self._echoes_due:
            self._echoes_due.discard(choice)
            piece = piece._replace(text=self._echo + piece.text)
        if piece.delta is None and not self._logprobs and choice not in self._roles_due:
            if not piece.text:
                return None
            return self._before[choice] + _json(piece.text) + self._after
        if not (piece.text or piece.delta or (self._logprobs and piece.logprobs)):
            return None
        return self._whole(piece)

    def _whole(self, piece: Piece) -> bytes:
        body: dict[str, Any] = {"index": piece.choice}
        if self._chat:
            body["delta"] = self._delta(piece)
        else:
            body["text"] = piece.text
        if self._logprobs or not self._chat:
            body["logprobs"] = self._logprobs_of(piece) if self._logprobs else None
        body["finish_reason"] = None
        choices = [*self._openings(piece.choice), body]
        return self._head + b',"choices":' + _json(choices) + self._tail

    def _openings(self, choice: int) -> list[dict[str, Any]]:
        """Begin the choices before one that speaks sooner: OpenAI's SDK puts each at the end of
        its list, and fails where one is out of its place."""
        before = sorted(due for due in self._roles_due if due < choice)
        self._roles_due -= set(before)
        delta = {"role": "assistant", "content": ""}
        return [{"index": due, "delta": delta, "finish_reason": None} for due in before]

    def _logprobs_of(self, piece: Piece) -> dict[str, Any]:
        offset = self._offsets.get(piece.choice, 0)
        self._offsets[piece.choice] = offset + sum(len(t.text) for t in piece.logprobs or ())
        return logprobs_of([piece], chat=self._chat, offset=offset)

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.choice in self._roles_due:
            self._roles_due.discard(piece.choice)
            delta["role"] = "assistant"
        if piece.text or piece.delta is None:
            delta["content"] = piece.text
        return delta | (piece.delta or {})

    def finish(self, reasons: Sequence[str]) -> bytes:
        """Return the chunk that says why each choice ended."""
        choices = []
        for choice, reason in enumerate(reasons):
            body: dict[str, Any] = {"index": choice}
            if self._chat:
                silent = choice in self._roles_due
                body["delta"] = {"role": "assistant", "content": ""} if silent else {}
            else:
                echo = self._echo if choice in self._echoes_due else ""
                body |= {"text": echo, "logprobs": None}
            choices.append(body | {"finish_reason": reason})
        self._roles_due.clear()
        self._echoes_due.clear()
        return self._head + b',"choices":' + _json(choices) + self._tail

    def usage(self, usage: Usage) -> bytes | None:
        """Return the usage chunk, None where it was not asked for."""
        if not self._include_usage:
            return None
        return self._head + b',"choices":[],"usage":' + _json(usage_of(usage)) + b"}"


def answer_id(request: str, shape: Shape) -> str:
    """Return the API's id of an answer: it names the kind, and holds the request's id."""
    prefix = "chatcmpl" if shape.endpoint == "chat" else "cmpl"
    return f"{prefix}-{request.removeprefix('req_')}"


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the API's usage object; reasoning is counted where it is told apart."""
    reasoning = usage.reasoning_tokens
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    } | ({} if reasoning is None else details)


def logprobs_of(pieces: Sequence[Piece], *, chat: bool, offset: int = 0) -> dict[str, Any]:
    """Return the API's log probabilities of some pieces of one choice.

    `offset` is where their text begins, in characters.
    """
    tokens = [token for piece in pieces for token in piece.logprobs or ()]
    if chat:
        return {"content": [logprob_of(token) for token in tokens]}
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "text_offset": offsets,
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens],
    }


def _likeliest(token: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens of a completion's place, and the chosen one in any case."""
    likeliest = {top.text: finite(top.logprob) for top in token.top}
    return likeliest if token.text in likeliest else likeliest | {token.text: finite(token.logprob)}
