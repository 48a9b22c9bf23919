"""Where patterns match in a text, and what of a match can be relied on while the text still grows.

Rule: pure. Whether a match counts does not depend on how the text was cut, as far as no match is
longer than `bound` characters: one that reaches the end of what is known is not believed yet, since
the next character may undo it (`\\b`, a lookahead) or lengthen it.
"""

import re
from collections.abc import Sequence
from typing import Final

BLOCK_CHARACTERS: Final = 64 * 1024
"""A search holds the interpreter to its end, so a long text is searched in blocks of this size."""

Patterns = tuple[re.Pattern[str], ...]


def compile_patterns(sources: Sequence[str]) -> Patterns:
    """Return the patterns. Raises ValueError naming the one that cannot be used."""
    found = []
    for source in sources:
        try:
            pattern = re.compile(source)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"the pattern {source!r} is no regular expression: {error}") from None
        if pattern.search("") is not None:
            raise ValueError(f"the pattern {source!r} matches the empty text, and so everything")
        found.append(pattern)
    return tuple(found)


def first_match(
    patterns: Patterns, text: str, *, start: int, search_from: int, ended: bool, bound: int
) -> int | None:
    """Return where the first match begins that does not end before `start`, None where none does.

    What stands before `search_from` is looked at by lookbehinds only. `ended`: nothing follows.
    """
    begins = [
        begin
        for pattern in patterns
        if (
            begin := _begin(
                pattern, text, len(text), start=start, at=search_from, ended=ended, bound=bound
            )
        )
        is not None
    ]
    return min(begins, default=None)


def matches_anywhere(patterns: Patterns, text: str, *, bound: int) -> bool:
    """Tell whether anything in a whole text matches.

    In a text of more than a block, a match longer than `bound` may be missed at a block's edge.
    """
    for begin in range(0, len(text), BLOCK_CHARACTERS):
        end = min(len(text), begin + BLOCK_CHARACTERS)
        at, ended = max(0, begin - bound), end == len(text)
        for pattern in patterns:
            if _begin(pattern, text, end, start=0, at=at, ended=ended, bound=bound) is not None:
                return True
    return False


def _begin(
    pattern: re.Pattern[str],
    text: str,
    end: int,
    *,
    start: int,
    at: int,
    ended: bool,
    bound: int,
) -> int | None:
    while (found := pattern.search(text, at, end)) is not None:
        first, last = found.span()
        if last <= start and first < start:
            at = max(last, first + 1)  # all of it is out already, and was looked at before
            continue
        if last == end and not ended and last - first < bound:
            return None
        return first
    return None
