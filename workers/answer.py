"""One choice of an answer while it is moderated: what it may say by now, and on which token.

Rule: pure. The content, the reasoning and the arguments of each tool call are texts of their own,
each held back by itself; one is over when another goes on. Token ids go out one piece late, so that
the last of them carries what was held back to the end. A log probability goes out once the text of
its token has.
"""

from collections import deque
from typing import Any, Final

from schemas.wire import Piece, TokenLogprob
from workers.tail import Tail

CONTENT: Final = "content"
CALLS: Final = "tool_calls"
_HALF: Final = "\ufffd"
"""How a part of a character is shown."""

Name = str | int
"""A text's name: a member of the delta, or the index of a tool call."""


class Answer:
    """One choice."""

    def __init__(self, choice: int, *, bound: int, before: str = "") -> None:
        """`before` is the content that earlier attempts have published."""
        self.over = False
        self._choice = choice
        self._bound = bound
        self._tails: dict[Name, Tail] = {CONTENT: Tail(bound=bound, before=before)}
        self._current: Name = CONTENT
        self._waiting: tuple[int, ...] = ()
        self._new: tuple[int, ...] = ()
        self._out: dict[Name, str] = {}
        self._heads: dict[int, dict[str, Any]] = {}
        self._more: dict[str, Any] = {}
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()
        self._received = self._released = self._lag = 0

    @property
    def current(self) -> Name:
        """The text that grew last."""
        return self._current

    def tail(self, name: Name) -> Tail:
        """Return what is held back of a text."""
        found = self._tails.get(name)
        if found is None:
            found = self._tails[name] = Tail(bound=self._bound)
        return found

    def take(self, piece: Piece) -> list[tuple[Name, str]]:
        """Take a piece but for its texts, and return these in their order, to be added."""
        self._new = piece.tokens
        texts = [(CONTENT, piece.text)] if piece.delta is None else self._split(piece)
        if piece.logprobs:
            self._take_logprobs(piece.logprobs, sum(len(text) for _, text in texts))
        return [(name, text) for name, text in texts if text]

    def _split(self, piece: Piece) -> list[tuple[Name, str]]:
        """Return a piece's texts: reasoning comes before content, and content before calls."""
        assert piece.delta is not None
        texts: list[tuple[Name, str]] = []
        for member, value in piece.delta.items():
            if isinstance(value, str):
                texts.append((member, value))
            elif member != CALLS:
                self._more[member] = value
        texts.append((CONTENT, piece.text))
        for call in piece.delta.get(CALLS) or ():
            function = dict(call.get("function") or {})
            texts.append((call["index"], function.pop("arguments", None) or ""))
            head = {name: value for name, value in call.items() if name != "function"}
            if function or len(head) > 1:
                self._heads[call["index"]] = head | {"function": function}
        return texts

    def _take_logprobs(self, logprobs: tuple[TokenLogprob, ...], characters: int) -> None:
        # The engine may hold text back as well (a stop string): what its tokens say beyond what
        # came of them is still to come, and their log probabilities wait for it.
        said = sum(len(token.text.replace(_HALF, "")) for token in logprobs)
        self._lag = max(0, self._lag + said - characters)
        due = self._received + characters + self._lag
        self._logprobs.extend((due, token) for token in logprobs)

    def add(self, name: Name, text: str) -> None:
        """Add to a text; it is held back."""
        self._current = name
        self._received += len(text)
        self.tail(name).add(text)

    def release(self, name: Name, *, ended: bool) -> None:
        """Give out what may be, of a text that was looked at."""
        self._give(name, self.tail(name).take(ended=ended))

    def cut(self, name: Name, at: int) -> None:
        """End the answer at a place of a text."""
        self._give(name, self.tail(name).cut(at))
        self.over = True

    def _give(self, name: Name, text: str) -> None:
        if text:
            self._released += len(text)
            self._out[name] = self._out.get(name, "") + text

    def pieces(self) -> list[Piece]:
        """Return what goes out after a piece was taken: none, or one."""
        if self.over:
            # The piece that went too far is not told, unless there is none before it: who goes on
            # after this worker's death has the engine make it again, and finds the same.
            return [self._piece(self._waiting or self._new)]
        tokens, self._waiting = self._waiting, self._new
        return [self._piece(tokens)] if tokens else []

    def last(self) -> list[Piece]:
        """Return what goes out at the end; all texts were looked at."""
        if not self.over:
            self._released = self._received + self._lag
        tokens, self._waiting = self._waiting, ()
        return [self._piece(tokens)] if tokens else []

    def _piece(self, tokens: tuple[int, ...]) -> Piece:
        logprobs = []
        while self._logprobs and self._logprobs[0][0] <= self._released:
            logprobs.append(self._logprobs.popleft()[1])
        out, self._out = self._out, {}
        text = out.pop(CONTENT, "")
        delta = self._delta(out) if out or self._heads or self._more else None
        return Piece(self._choice, text, tokens, tuple(logprobs) or None, delta)

    def _delta(self, out: dict[Name, str]) -> dict[str, Any]:
        delta: dict[str, Any] = {name: text for name, text in out.items() if isinstance(name, str)}
        delta |= self._more
        calls = []
        for index in sorted({name for name in out if isinstance(name, int)} | self._heads.keys()):
            head = self._heads.get(index, {"index": index})
            function = {**head.get("function", {}), "arguments": out.get(index, "")}
            calls.append(head | {"function": function})
        if calls:
            delta[CALLS] = calls
        self._heads, self._more = {}, {}
        return delta
