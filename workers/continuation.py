"""The text of a generation that goes on where another left it.

Rule: what was emitted stays; what the first attempt held back (half a character, the beginning of
a stop string) is neither lost nor emitted twice. The engine gives token ids only; the text is that
of all ids together, less what was emitted.
"""

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]

CONTEXT_TOKENS: Final = 8
"""How many of the prompt's tokens are decoded along: some tokenizers drop a leading blank."""
_INCOMPLETE: Final = "\ufffd"


class Continuation:
    """The text of one choice from some token on."""

    def __init__(
        self,
        decode: Decode,
        *,
        prompt: Sequence[int],
        made: Sequence[int],
        emitted: str,
        stops: Sequence[str],
    ) -> None:
        self.stopped = False
        self._decode = decode
        self._context = list(prompt[-CONTEXT_TOKENS:])
        self._context_text = decode(self._context)
        self._ids = list(made)
        self._emitted = len(emitted)
        self._stops = tuple(stops)

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text that may be sent now that these ids are made.

        `last` gives up what is held back. Once `stopped` is true, nothing more comes.
        """
        if self.stopped:
            return ""
        self._ids.extend(ids)
        pending = self._text()[self._emitted :]
        if not last:
            pending = pending.rstrip(_INCOMPLETE)
        found = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            self.stopped = True
            return pending[: min(found)[1]]
        text = pending if last else pending[: len(pending) - self._held_back(pending)]
        self._emitted += len(text)
        return text

    def _text(self) -> str:
        return self._decode([*self._context, *self._ids]).removeprefix(self._context_text)

    def _held_back(self, pending: str) -> int:
        """Return how many characters at the end could begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            end = pending[len(pending) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
