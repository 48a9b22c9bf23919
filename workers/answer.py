"""One choice of an answer while it is moderated: which of its pieces may go out by now.

Rule: pure; pieces go out in their order and as they are, each once all of its text has passed. The
content, the reasoning and the arguments of each tool call are texts of their own, each held back by
itself; one is over when another goes on.
"""

from collections import deque
from typing import Any, Final, NamedTuple

from schemas.wire import Piece, TokenLogprob
from workers.tail import Tail

CONTENT: Final = "content"
CALLS: Final = "tool_calls"
_HALF: Final = "\ufffd"
"""How a part of a character is shown."""

Name = str | int
"""A text's name: the content, a member of the delta, or the index of a tool call."""


class _Held(NamedTuple):
    """A piece, the characters that were made when its text ends, and how many of these must have
    passed before it goes out."""

    piece: Piece
    end: int
    due: int


class Answer:
    """One choice."""

    def __init__(self, choice: int, *, bound: int, before: str = "") -> None:
        """`before` is the content that earlier attempts have published."""
        self.over = False
        self._choice = choice
        self._bound = bound
        self._tails: dict[Name, Tail] = {CONTENT: Tail(bound=bound, before=before)}
        self._current: Name = CONTENT
        self._held: deque[_Held] = deque()
        self._made = self._passed = self._lag = 0

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
        """Hold a piece back; return its texts in their order, to be added one by one."""
        texts = texts_of(piece)
        characters = sum([len(text) for _, text in texts])
        if piece.logprobs:
            self._lag = _lag(self._lag, piece.logprobs, characters)
        end = self._made + characters
        self._held.append(_Held(piece, end, end + self._lag))
        return texts

    def add(self, name: Name, text: str) -> None:
        """Add to a text."""
        self._current = name
        self._made += len(text)
        self.tail(name).add(text)

    def release(self, name: Name, *, ended: bool) -> None:
        """Let pass what may, of a text that was looked at."""
        self._passed += self.tail(name).release(ended=ended)

    def cut(self, name: Name, at: int) -> None:
        """End the answer at a place of a text."""
        self._passed += self.tail(name).cut(at)
        self.over = True

    def pieces(self) -> list[Piece]:
        """Return what goes out now."""
        out = []
        held = self._held
        while held and held[0].due <= self._passed:
            out.append(held.popleft().piece)
        return out + self._cut_off() if self.over else out

    def last(self) -> list[Piece]:
        """Return what goes out at the end of an answer that has passed."""
        out = [held.piece for held in self._held]
        self._held.clear()
        return out

    def _cut_off(self) -> list[Piece]:
        """Return what stands before the cut in pieces that do not go out as they are."""
        out = []
        for piece, end, _ in self._held:
            begin = end - sum([len(text) for _, text in texts_of(piece)])
            if begin >= self._passed:
                break
            out.append(_beginning(piece, self._passed - begin))
        return out


def texts_of(piece: Piece) -> list[tuple[Name, str]]:
    """Return what a piece says: reasoning comes before content, and content before calls."""
    if piece.delta is None:
        return [(CONTENT, piece.text)] if piece.text else []
    delta, calls = piece.delta, piece.delta.get(CALLS) or ()
    texts: list[tuple[Name, str]] = [
        *((member, value) for member, value in delta.items() if isinstance(value, str)),
        (CONTENT, piece.text),
        *((call["index"], (call.get("function") or {}).get("arguments") or "") for call in calls),
    ]
    return [(name, text) for name, text in texts if text]


def _lag(lag: int, logprobs: tuple[TokenLogprob, ...], characters: int) -> int:
    """Return by how many characters an engine's text is behind its tokens: it may hold back as well
    (a stop string), and a log probability tells its token."""
    said = sum([len(token.text.replace(_HALF, "")) for token in logprobs])
    return max(0, lag + said - characters)


def _beginning(piece: Piece, characters: int) -> Piece:
    """Return a piece with the first characters of its texts alone, in the order of `texts_of`."""
    left = characters

    def begun(text: str) -> str:
        nonlocal left
        shown = text[:left]
        left -= len(shown)
        return shown

    members = piece.delta or {}
    delta: dict[str, Any] = {}
    for member, value in members.items():
        if isinstance(value, str) and left:
            delta[member] = begun(value)
    text = begun(piece.text)
    calls = []
    for call in members.get(CALLS) or ():
        if not left:
            break
        function = call.get("function") or {}
        if arguments := function.get("arguments"):
            call = {**call, "function": {**function, "arguments": begun(arguments)}}
        calls.append(call)  # a call's name may stand before its arguments, in an entry of its own
    if calls:
        delta[CALLS] = calls
    return Piece(piece.choice, text, piece.tokens, None, delta or None)
