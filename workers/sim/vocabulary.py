"""The simulated engine's vocabulary: what each token's bytes are, and which are plain words.

The file is a byte-level BPE as the `tokenizers` package writes it (scripts/train-sim-tokenizer).
Only its vocabulary is read here: prompts arrive as token ids.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from zlib import crc32

_PLAIN = re.compile(rb" [a-z]{3,}")
_FILES = ("tokenizer.json", "tokenizer_config.json")


def tokenizer_files() -> dict[str, bytes]:
    """Return the tokenizer's files by name, as Hugging Face names them."""
    folder = resources.files(__package__)
    return {name: folder.joinpath(name).read_bytes() for name in _FILES}


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Tokens by id, ids by bytes, and the ids of plain readable words."""

    content: tuple[bytes, ...]
    ids: dict[bytes, int]
    words: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ids there are, from 0."""
        return len(self.content)

    def text(self, token: int) -> str:
        """Return a token's text by itself; bytes that are no character read as U+FFFD."""
        return self.content[token].decode(errors="replace")

    def id_of(self, content: bytes) -> int:
        """Return the id of a token of these bytes; where there is none, always the same word's."""
        found = self.ids.get(content)
        return self.words[crc32(content) % len(self.words)] if found is None else found


@cache
def vocabulary() -> Vocabulary:
    """Read the vocabulary; once per process."""
    file = json.loads(tokenizer_files()["tokenizer.json"])
    special = {entry["id"]: entry["content"].encode() for entry in file["added_tokens"]}
    letters = _letters()
    content = [b""] * len(file["model"]["vocab"])
    for name, token in file["model"]["vocab"].items():
        content[token] = special.get(token) or bytes(letters[letter] for letter in name)
    return Vocabulary(
        content=tuple(content),
        ids={raw: token for token, raw in enumerate(content) if token not in special},
        words=tuple(token for token, raw in enumerate(content) if _PLAIN.fullmatch(raw)),
    )


def _letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level BPE stands for.

    GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes in order for U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return letters
