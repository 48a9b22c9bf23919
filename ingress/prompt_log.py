"""The line that is logged of a prompt where the operator asks for it. Rule: without that there is
none, and what looks like a secret or a person's is not in it.

Redaction and truncation are pure. A text is redacted before it is cut, so that no half of a secret
stands at the end.
"""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

log = logging.getLogger(__name__)

REDACTED: Final = "[redacted]"
MARGIN_CHARACTERS: Final = 4096
"""How far behind the bound is looked for the end of what begins before it."""
_DATE: Final = r"(?<!\d)(?:19|20)\d\d-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])(?!\d)"
NUMBERS: Final = re.compile(rf"(?<!\d)(?=((?:(?!{_DATE})\d)(?:[ -]?(?!{_DATE})\d){{12,18}}(?!\d)))")
"""The longest number of 13 to 19 digits from each place where one may begin: where other digits
stand before a card's, what begins at those ends within the card. Matches are empty, so that they
may overlap; the number is group 1. A date among the digits is no part of one."""
DEFAULTS: Final = tuple(
    re.compile(source)
    for source in (
        # Possessive, and from where a word begins: no text takes more than linear time.
        r"(?<![\w.%+'-])[\w.%+'-]++@[\w-]++(?:\.[\w-]++)+",  # e-mail addresses
        r"(?<!\d)\d(?:[ -]?\d){12,18}(?!\d)",  # 13 to 19 digits, as cards have
        NUMBERS,
        r"(?i:bearer)\s+[A-Za-z0-9._~+/=-]+",
        r"\b(?:sk|pk|rk|hr)-[A-Za-z0-9_-]{8,}",  # API keys; ours begin with hr-
        r"(?<![\w-])eyJ[\w-]++(?:\.[\w-]*+)++",  # JSON Web Tokens, encrypted or cut off too
    )
)


class PromptLog:
    """Writes the lines. `characters_max` bounds what stands of a prompt in one."""

    def __init__(self, *, redact: Sequence[re.Pattern[str]], characters_max: int) -> None:
        self._patterns = (*DEFAULTS, *redact)
        self._characters_max = characters_max

    def write(self, *, request: str, tenant: str, model: str, texts: Sequence[str]) -> None:
        """Log what a client asks."""
        characters = sum(map(len, texts)) + max(0, len(texts) - 1)
        beginning = joined(texts, self._characters_max + MARGIN_CHARACTERS)
        shown = redacted(beginning, self._patterns, characters_max=self._characters_max)
        self._line(
            request=request,
            tenant=tenant,
            model=model,
            prompt=shown,
            characters=characters,
            truncated=characters > self._characters_max,
        )

    def refused(self, *, request: str, tenant: str, model: str, code: str) -> None:
        """Log that a request was refused for what it says, and not what that was."""
        self._line(request=request, tenant=tenant, model=model, prompt=None, refused=code)

    def _line(self, **members: str | int | None) -> None:
        # JSON in ASCII: no line break, nothing that commands a terminal.
        log.info("%s", json.dumps(members))


def joined(texts: Iterable[str], characters_max: int) -> str:
    """Return the beginning of texts, each on a line of its own, without copying all of them."""
    parts: list[str] = []
    left = characters_max
    for text in texts:
        if left <= 0:
            break
        parts.append(text[:left])
        left -= len(parts[-1]) + 1
    return "\n".join(parts)


def redacted(text: str, patterns: Sequence[re.Pattern[str]], *, characters_max: int) -> str:
    """Return the first characters of a text, with what matches replaced; a match that begins among
    them is replaced whole."""
    spans = sorted(_span(found) for pattern in patterns for found in pattern.finditer(text))
    edges = [0]
    for begin, end in spans:
        if begin >= characters_max:
            break
        if begin >= edges[-1]:
            edges += [begin, end]
        else:
            edges[-1] = max(edges[-1], end)
    edges.append(max(characters_max, edges[-1]))
    shown = [text[a:b] for a, b in list(pairwise(edges))[::2]]
    return REDACTED.join(shown)


def _span(found: re.Match[str]) -> tuple[int, int]:
    return found.span(1 if found.re is NUMBERS else 0)
