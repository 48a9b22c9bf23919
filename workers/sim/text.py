"""From token bytes to text that may be sent. Rule: however the bytes are cut, the text is the same.

An incomplete character waits for its rest. Of the text, the longest end that could be the beginning
of a stop string waits too; it is sent when it turns out to be none. Of two stop strings the one
that is complete first counts, and of two complete with the same character the longer.
"""

import codecs
from collections.abc import Sequence

_utf8 = codecs.getincrementaldecoder("utf-8")


class Assembler:
    """The text of one choice, as it may be sent."""

    __slots__ = ("_bytes", "_held", "_keep", "_starts", "_stops", "stopped")

    def __init__(self, stops: Sequence[str] = (), *, keep: bool = False) -> None:
        """`keep` sends the stop string itself too."""
        self._keep = keep
        self._bytes = _utf8(errors="replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._starts = frozenset(
            stop[:length] for stop in self._stops for length in range(1, len(stop))
        )
        self._held = ""
        self.stopped = False

    def push(self, content: bytes, *, last: bool = False) -> str:
        """Return the text that may be sent now that these bytes are known.

        `last` gives up all that is held back: an incomplete character as one U+FFFD. Once
        `stopped` is true, nothing more comes.
        """
        text = self._bytes.decode(content, last)
        if not self._stops:
            return text
        if self.stopped:
            return ""
        pending = self._held + text
        cut = self._match(pending)
        if cut is not None:
            self.stopped = True
            self._held = ""
            return pending[:cut]
        keep = 0 if last else self._held_back(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def _match(self, pending: str) -> int | None:
        """Return where the text ends for the stop string that is complete first."""
        found = [
            (start + len(stop), start) for stop in self._stops if (start := pending.find(stop)) >= 0
        ]
        if not found:
            return None
        end, start = min(found)
        return end if self._keep else start

    def _held_back(self, pending: str) -> int:
        """Return how many characters at the end could begin a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if pending[len(pending) - length :] in self._starts:
                return length
        return 0
