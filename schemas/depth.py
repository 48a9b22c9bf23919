"""How deeply JSON may be nested. Rule: one bound for all that clients send, found at the speed of
C, whatever else is wrong with it.

Decoders stop by themselves only where Python's stack ends, which depends on who called them.
"""

from itertools import accumulate
from typing import Final

from schemas.errors import InvalidRequest

DEPTH_MAX: Final = 128
"""Lists and objects inside each other: schemas of tools need 20."""
CONTAINERS_MAX: Final = 262_144
"""Lists and objects of a request in all: to follow as many takes 20 ms."""

_TOO_MANY: Final = f"There are more than {CONTAINERS_MAX} lists and objects."
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHERS: Final = bytes(set(range(256)) - set(b'[]{}"'))


def check_depth(text: bytes, *, depth_max: int = DEPTH_MAX) -> None:
    """Refuse JSON that is nested more deeply. Raises InvalidRequest.

    What is no JSON is refused for its depth or not at all.
    """
    if text.count(b"[") + text.count(b"{") <= depth_max:
        return
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes side by side are a string without brackets, or a string's end and another's start:
    # without both, what is inside a string stays inside one.
    brackets = text.translate(None, _OTHERS).replace(b'""', b"")
    # So a bracket stands between any two strings that are left: with too many, none is taken apart.
    most = 2 * CONTAINERS_MAX
    if brackets.count(b'"') // 2 - 1 > most:
        raise InvalidRequest(_TOO_MANY)
    steps = b"".join(brackets.split(b'"')[::2]).translate(_STEPS)
    if len(steps) > most:
        raise InvalidRequest(_TOO_MANY)
    if max(accumulate(memoryview(steps).cast("b")), default=0) > depth_max:
        raise InvalidRequest(f"Lists and objects are nested at most {depth_max} deep.")
