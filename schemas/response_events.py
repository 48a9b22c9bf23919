"""The typed events of a response, and its object. Rule: a pure function of the reply's shape and
events, so that a replay is equal byte for byte, and the object is what the events add up to.

Names and members as in OpenAI's reference of streaming events. `sequence_number` counts the events
from 0. A message, a reasoning or a function call is an output item; text that follows on text is
the same item's, and calls stay open to the end, since the parts of several may come in turns, and
what a parser held back may come between them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from schemas.errors import Refusal, RequestCancelled
from schemas.logprobs import logprob_of
from schemas.reply import Broken, Complete, Event, Shown
from schemas.responses import response_id
from schemas.wire import Piece, Shape, TokenLogprob, Usage

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

_json = msgspec.json.Encoder().encode

_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_REASONING: Final = ("reasoning_content", "reasoning")
"""How a chat's delta calls what the model thinks."""
_ERROR_CODES: Final = {"invalid_request": "invalid_prompt"}
"""OpenAI's codes of a failed response are a closed set; all others of ours are `server_error`."""
_EMPTY_OBJECT: Final = b"{}"


class Rendered(NamedTuple):
    """An event: its type, its sequence number, and its JSON."""

    name: str
    seq: int
    body: bytes


class _Repeated(msgspec.Struct, frozen=True):
    background: bool = False


class _Item:
    """An output item while it is made."""

    kind = "message"
    prefix = "msg"

    def __init__(self, index: int, stem: str) -> None:
        self.index = index
        self.id = f"{self.prefix}_{stem}o{index}"
        self.status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def whole(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.kind, "status": self.status} | self.members()

    def members(self) -> dict[str, Any]:
        raise NotImplementedError


class _Message(_Item):
    def __init__(self, index: int, stem: str) -> None:
        super().__init__(index, stem)
        self.logprobs: list[dict[str, Any]] = []
        self.begun = False  # whether its only part is there

    def part(self) -> dict[str, Any]:
        body = {"type": "output_text", "text": self.text, "annotations": []}
        return body | {"logprobs": self.logprobs}

    def members(self) -> dict[str, Any]:
        return {"role": "assistant", "content": [self.part()] if self.begun else []}


class _Thought(_Item):
    kind = "reasoning"
    prefix = "rs"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def members(self) -> dict[str, Any]:
        return {"summary": [], "content": [self.part()] if self.texts else []}


class _Call(_Item):
    kind = "function_call"
    prefix = "fc"

    def __init__(self, index: int, stem: str, *, call_id: str, name: str) -> None:
        super().__init__(index, stem)
        self.call_id = call_id
        self.name = name

    def members(self) -> dict[str, Any]:
        return {"call_id": self.call_id, "name": self.name, "arguments": self.text}


_Kind = TypeVar("_Kind", bound=_Item)


class ResponseEvents:
    """Renders the events of one reply, and adds them up to the response object."""

    def __init__(self, request: str, shape: Shape) -> None:
        self.status: Status = "queued"
        self._stem = request.removeprefix("req_")
        self._seq = 0
        self._logprobs = shape.logprobs
        self._items: list[_Item] = []
        self._open: list[_Item] = []
        self._calls: dict[int, _Call] = {}
        self._silent: list[TokenLogprob] = []  # without text, and it is not known of what
        self._reasoning_tokens = 0
        self._error: dict[str, Any] | None = None
        self._incomplete: dict[str, Any] | None = None
        self._usage: Usage | None = None
        repeated = shape.response or _EMPTY_OBJECT
        self._background = msgspec.json.decode(repeated, type=_Repeated).background
        head = {
            "id": response_id(request),
            "object": "response",
            "created_at": shape.created_s,
            "model": shape.model,
        }
        rest = repeated[1:-1]
        self._head = _json(head)[:-1] + (b"," + rest if rest else b"") + b","
        self._delta: tuple[bytes, bytes] | None = None

    @property
    def gone_on_from(self) -> bool:
        """Whether the response may be another's previous one: it has an answer."""
        return self.status in ("completed", "incomplete")

    # Events

    def opening(self) -> list[Rendered]:
        """Return the events that come before all others, as soon as the reply has begun."""
        events = []
        if self._background:
            events = [self._lifecycle("response.created"), self._lifecycle("response.queued")]
        self.status = "in_progress"
        if not self._background:
            events = [self._lifecycle("response.created")]
        return [*events, self._lifecycle("response.in_progress")]

    def render(self, events: Sequence[Event]) -> list[Rendered]:
        """Return the events that some events of the reply are."""
        if len(events) == 1 and type(events[0]) is Shown:  # nearly always
            return self.piece(events[0].piece)
        rendered: list[Rendered] = []
        for event in events:
            match event:
                case Shown(_, piece):
                    rendered += self.piece(piece)
                case Complete():
                    rendered += self._complete(event)
                case Broken():
                    rendered += self._broken(event)
        return rendered

    def piece(self, piece: Piece) -> list[Rendered]:
        """Return the events of a piece; none for one that shows nothing."""
        if piece.delta is None and not self._logprobs and self._delta is not None:
            return [self._plain(piece.text)] if piece.text else []
        return list(self._piece(piece))

    def _plain(self, text: str) -> Rendered:
        """Return more text of the open message: what nearly every event is."""
        assert self._delta is not None
        self._open[-1].texts.append(text)
        before, after = self._delta
        seq, self._seq = self._seq, self._seq + 1
        body = b"%b%d%b%b}" % (before, seq, after, _json(text))
        return Rendered("response.output_text.delta", seq, body)

    def _piece(self, piece: Piece) -> Iterator[Rendered]:
        delta = piece.delta or {}
        for member in _REASONING:
            if delta.get(member):
                self._reasoning_tokens += len(piece.tokens)
                yield from self._think(delta[member])
                break
        logprobs = (piece.logprobs or ()) if self._logprobs else ()
        if piece.text:
            yield from self._say(piece.text, logprobs)
        elif logprobs and not delta:
            yield from self._say_nothing(logprobs)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def _say(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[Rendered]:
        message = self._open[-1] if self._open else None
        if not isinstance(message, _Message):
            yield from self._close_texts()
            logprobs, self._silent = [*self._silent, *logprobs], []
            message = self._begin(_Message(len(self._items), self._stem))
            yield self._added(message)
            message.begun = True
            yield self._of_part("response.content_part.added", message, part=message.part())
            self._delta = self._delta_of(message)
        shown = [logprob_of(token) for token in logprobs]
        message.texts.append(text)
        message.logprobs += shown
        yield self._of_part("response.output_text.delta", message, delta=text, logprobs=shown)

    def _say_nothing(self, logprobs: Sequence[TokenLogprob]) -> Iterator[Rendered]:
        """Tell of tokens without text, once it is known that they are a message's: half a
        character may be a thought's, and markup may begin a thought or a call."""
        if self._open and isinstance(self._open[-1], _Message):
            yield from self._say("", logprobs)
        else:
            self._silent += logprobs

    def _delta_of(self, message: _Message) -> tuple[bytes, bytes]:
        """Return what stands round the number in an event of plain text."""
        name = b'{"type":"response.output_text.delta","sequence_number":'
        place = {"item_id": message.id, "output_index": message.index, "content_index": 0}
        return name, b"," + _json(place)[1:-1] + b',"logprobs":[],"delta":'

    def _think(self, text: str) -> Iterator[Rendered]:
        self._silent = []
        thought = self._open[-1] if self._open else None
        if not isinstance(thought, _Thought):
            yield from self._close_texts()
            thought = self._begin(_Thought(len(self._items), self._stem))
            yield self._added(thought)
            part = {"type": "reasoning_text", "text": ""}
            yield self._of_part("response.content_part.added", thought, part=part)
        thought.texts.append(text)
        yield self._of_part("response.reasoning_text.delta", thought, delta=text)

    def _call(self, delta: dict[str, Any]) -> Iterator[Rendered]:
        self._silent = []
        function = delta.get("function") or {}
        call = self._calls.get(delta["index"])
        if call is None:
            if self._open and not isinstance(self._open[-1], _Call):
                yield from self._close_texts()
            index = len(self._items)
            call_id = delta.get("id") or f"call_{self._stem}o{index}"
            name = function.get("name") or ""
            call = self._begin(_Call(index, self._stem, call_id=call_id, name=name))
            self._calls[delta["index"]] = call
            yield self._added(call)
        if arguments := function.get("arguments"):
            call.texts.append(arguments)
            name = "response.function_call_arguments.delta"
            yield self._of_item(name, call, delta=arguments)

    def _begin(self, item: _Kind) -> _Kind:
        self._items.append(item)
        self._open.append(item)
        return item

    def _close_texts(self) -> Iterator[Rendered]:
        """End what is open, except for calls: more of them may come."""
        yield from self._close([item for item in self._open if not isinstance(item, _Call)])

    def _close(self, items: Sequence[_Item]) -> Iterator[Rendered]:
        """End open items."""
        self._delta = None
        for item in items:
            match item:
                case _Message():
                    more = {"text": item.text, "logprobs": item.logprobs}
                    yield self._of_part("response.output_text.done", item, **more)
                    yield self._of_part("response.content_part.done", item, part=item.part())
                case _Thought():
                    yield self._of_part("response.reasoning_text.done", item, text=item.text)
                    yield self._of_part("response.content_part.done", item, part=item.part())
                case _Call():
                    name = "response.function_call_arguments.done"
                    yield self._of_item(name, item, name=item.name, arguments=item.text)
            item.status = "incomplete" if self._incomplete else "completed"
            yield self._event("response.output_item.done", self._place(item))
        self._open = [item for item in self._open if item not in items]

    def _complete(self, complete: Complete) -> Iterator[Rendered]:
        self._usage = complete.usage
        reason = _INCOMPLETE.get(complete.reasons[0]) if complete.reasons else None
        if reason is not None:
            self._incomplete = {"reason": reason}
        if not self._items and complete.reasons:  # without a choice nothing was to be made
            yield from self._say("", ())
        yield from self._close(self._open)
        self.status = "incomplete" if self._incomplete else "completed"
        yield self._lifecycle(f"response.{self.status}")

    def _broken(self, broken: Broken) -> Iterator[Rendered]:
        self._usage = broken.usage
        for item in self._open:
            item.status = "incomplete"
        self._open = []
        if broken.code == RequestCancelled.code:
            self.status = "cancelled"
            yield self.error(RequestCancelled(broken.message))
            return
        self.status = "failed"
        code = _ERROR_CODES.get(broken.code, "server_error")
        self._error = {"code": code, "message": broken.message, "type": broken.code}
        yield self._lifecycle("response.failed")

    def error(self, refusal: Refusal) -> Rendered:
        """Return the event that ends the stream, not the response, with an error."""
        body = refusal.body() | {
            "type": "error",
            "code": refusal.code,
            "message": refusal.message,
            "param": refusal.param,
            "sequence_number": self._seq,
        }
        return Rendered("error", self._seq, _json(body))

    def _added(self, item: _Item) -> Rendered:
        return self._event("response.output_item.added", self._place(item))

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"output_index": item.index, "item": item.whole()}

    def _of_part(self, name: str, item: _Item, **more: Any) -> Rendered:
        return self._of_item(name, item, content_index=0, **more)

    def _of_item(self, event: str, item: _Item, **more: Any) -> Rendered:
        return self._event(event, {"item_id": item.id, "output_index": item.index} | more)

    def _event(self, name: str, members: dict[str, Any]) -> Rendered:
        seq, self._seq = self._seq, self._seq + 1
        return Rendered(name, seq, _json({"type": name, "sequence_number": seq} | members))

    def _lifecycle(self, name: str) -> Rendered:
        return self._event(name, {"response": msgspec.Raw(self.response())})

    # The object

    def response(self) -> bytes:
        """Return the response object as it is by now, as JSON."""
        members = {
            "status": self.status,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "output": self.output(),
            "usage": None if self._usage is None else self._usage_of(self._usage),
        }
        return self._head + _json(members)[1:]

    def output(self) -> list[dict[str, Any]]:
        """Return the output items so far."""
        return [item.whole() for item in self._items]

    def _usage_of(self, usage: Usage) -> dict[str, Any]:
        reasoning = usage.reasoning_tokens  # a worker's parser tells them from their markup
        if reasoning is None:
            reasoning = self._reasoning_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
