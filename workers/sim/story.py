"""What the engine says by itself. Rule: token k is a pure function of prompt, seed and choice.

Tokens come in pages of 64, each page from one hash, so any position is as near as the first and
the same on every machine.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Final

from workers.sim.vocabulary import Vocabulary

PAGE: Final = 64
LENGTH_MIN: Final = 16
LENGTH_MAX: Final = 128

_PAGE = struct.Struct(f"<{PAGE}H")


class Story:
    """One choice's tokens, without end, and where it would end by itself."""

    __slots__ = ("_key", "_words", "length")

    def __init__(
        self, prompt: Sequence[int], *, seed: int | None, choice: int, vocabulary: Vocabulary
    ) -> None:
        digest = hashlib.blake2b(struct.pack("<QI", (seed or 0) % 2**64, choice), digest_size=16)
        digest.update(_words(prompt))
        self._key = digest.digest()
        self._words = vocabulary.words
        spread = int.from_bytes(self._key[:4], "little")
        self.length = LENGTH_MIN + spread % (LENGTH_MAX - LENGTH_MIN + 1)

    def page(self, number: int) -> list[int]:
        """Return the tokens `number` × 64 to `number` × 64 + 63."""
        raw = hashlib.shake_128(self._key + number.to_bytes(8, "little")).digest(_PAGE.size)
        words = self._words
        count = len(words)
        return [words[value % count] for value in _PAGE.unpack(raw)]

    def call_id(self, index: int) -> str:
        """Return the id of the tool call of this index."""
        raw = hashlib.blake2b(self._key + index.to_bytes(8, "little"), digest_size=12)
        return f"call_{raw.hexdigest()}"


def _words(prompt: Sequence[int]) -> bytes:
    words = array("I", prompt)
    if struct.pack("=H", 1) != struct.pack("<H", 1):  # pragma: no cover - big-endian machines
        words.byteswap()
    return words.tobytes()
