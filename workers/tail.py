"""The end of a text that is held back. Rule: pure; nothing passes that was not looked at, nor the
last `bound` - 1 characters while more may come.

So when the last character of a match arrives, the first one is still here, as long as the match has
at most `bound` characters. Of what has passed, twice the bound is remembered, for what looks at it.
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

    def release(self, *, ended: bool) -> int:
        """Let pass what may, now that all of `text` was looked at; return how many characters."""
        self._checked = len(self._text)
        return self.cut(self._checked if ended else self._checked - self._bound + 1)

    def cut(self, at: int) -> int:
        """Let pass what stands before a place in `text`; return how many characters."""
        passed = max(0, at - self._start)
        self._start += passed
        self._forget()
        return passed

    def _forget(self) -> None:
        # A character more than is searched: `^` matches at the beginning of what there is.
        excess = self._start - 2 * self._bound - 1
        if excess > 0:
            self._text = self._text[excess:]
            self._start -= excess
            self._checked -= excess
