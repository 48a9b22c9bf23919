"""The end of a text that is held back. Rule: pure; nothing is given out that was not looked at, nor
the last `bound` - 1 characters while more may come.

So when the last character of a match arrives, the first one is still here, as long as the match has
at most `bound` characters. Of what is out, twice the bound is remembered, for what looks at it.
"""


class Tail:
    """One text of one choice on its way out."""

    __slots__ = ("_bound", "_checked", "_start", "_text")

    def __init__(self, *, bound: int, before: str = "") -> None:
        """`before` is what earlier attempts have published of the text."""
        self._bound = bound
        self._text = before
        self._start = self._checked = len(before)
        self._forget()

    @property
    def text(self) -> str:
        """What is remembered, and all that is held back."""
        return self._text

    @property
    def start(self) -> int:
        """Where in `text` that begins which is held back."""
        return self._start

    @property
    def holds(self) -> bool:
        """Whether anything is held back."""
        return len(self._text) > self._start

    def add(self, text: str) -> None:
        """Take what was made."""
        self._text += text

    def due(self, every: int) -> bool:
        """Tell whether so many characters have not been looked at."""
        return len(self._text) - self._checked >= every

    def take(self, *, ended: bool) -> str:
        """Return what may go out now that all of `text` was looked at."""
        self._checked = len(self._text)
        return self._out(self._checked if ended else self._checked - self._bound + 1)

    def cut(self, at: int) -> str:
        """Return what may go out of a text that must end at `at`."""
        return self._out(at)

    def _out(self, end: int) -> str:
        if end <= self._start:
            return ""
        out = self._text[self._start : end]
        self._start = end
        self._forget()
        return out

    def _forget(self) -> None:
        # A character more than is searched, so that what is forgotten is not taken for a beginning.
        excess = self._start - 2 * self._bound - 1
        if excess > 0:
            self._text = self._text[excess:]
            self._start -= excess
            self._checked -= excess
