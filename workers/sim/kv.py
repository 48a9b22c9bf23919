"""The KV cache in pages: blocks, who owns them, and which prefix each full one holds.

Rule: a block has at least one owner, or it is free; a free one keeps its content until it is taken
again, least recently used first. Names of content are a hash chain (as in vLLM's prefix cache), so
a name stands for the block's tokens and for all before them, and for the cache salt.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root_name(salt: str | None) -> bytes:
    """Return the name before a sequence's first block: another salt shares nothing."""
    raw = b"" if salt is None else b"\x01" + salt.encode(errors="surrogatepass")
    return hashlib.blake2b(raw, digest_size=16).digest()


def block_name(before: bytes, tokens: "array[int]") -> bytes:
    """Return the name of a full block that follows the block named `before`."""
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()


class KvCache:
    """A fixed number of blocks."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._owners = [0] * blocks
        self._untouched = 0  # blocks from here on were never owned
        self._free: OrderedDict[int, None] = OrderedDict()
        self._named: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """How many blocks nobody owns."""
        return len(self._free) + self.size - self._untouched

    @property
    def used(self) -> float:
        """The share of blocks that are owned."""
        return 1 - self.free / self.size

    def owners(self, block: int) -> int:
        """Return how many sequences hold a block."""
        return self._owners[block]

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest known beginning of these names."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """Own blocks that `find` returned, with whoever owns them already."""
        for block in blocks:
            if not self._owners[block]:
                del self._free[block]
            self._owners[block] += 1

    def take(self, count: int) -> list[int] | None:
        """Own so many blocks with no content, or none at all where there are not so many."""
        if count > self.free:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._untouched < self.size:
            block = self._untouched
            self._untouched += 1
        else:
            block, _ = self._free.popitem(last=False)
            self._forget(block)
        self._owners[block] = 1
        return block

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._named[name]

    def name(self, block: int, name: bytes) -> None:
        """Say what a full block holds; where another block holds the same, that one is found."""
        if name not in self._named:
            self._named[name] = block
            self._name_of[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Give up a sequence's blocks: its end is taken again before its beginning."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            assert self._owners[block] >= 0
            if self._owners[block]:
                continue
            self._free[block] = None
            if block not in self._name_of:
                self._free.move_to_end(block, last=False)
