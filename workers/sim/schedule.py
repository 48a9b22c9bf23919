"""Which rows compute what in the next step: continuous batching with chunked prefill.

Rule: first come, first served within a priority, as vLLM's scheduler has it: running rows first,
one token each or the next chunk of their prompt, then waiting ones while slots, tokens of the step
and KV blocks last. Where a running row finds no block, the last come gives up its own and computes
them again later. This file decides and never waits.
"""

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from workers.sim.kv import KvCache, block_name

_NEVER: Final = sys.maxsize


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """A sequence of tokens in the batch: a prompt and what was said after it.

    `computed` tokens are in the KV cache, `capacity` fit into the row's blocks, and `planned` are
    being computed by the present step. A paced row keeps its own time and is in no step.
    """

    rank: tuple[int, int]  # priority and number of arrival: the smaller goes first
    ids: "array[int]"
    root: bytes
    paced: bool = False
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    named: int = 0
    name_at: int = _NEVER
    computed: int = 0
    capacity: int = 0
    planned: int = 0
    cached: int | None = None  # tokens found in the cache when the row first ran


R = TypeVar("R", bound=Row)


class Scheduler(Generic[R]):
    """The rows of an engine."""

    def __init__(
        self, kv: KvCache, *, slots: int, step_tokens: int, block_size: int, caching: bool
    ) -> None:
        self.kv = kv
        self.waiting: list[R] = []
        self.running: dict[R, None] = {}
        self.stepping: dict[R, None] = {}
        self.entered: list[R] = []
        """Paced rows that began to run; whoever gives them their time empties it."""
        self.preemptions = 0
        self._slots = slots
        self._step_tokens = step_tokens
        self._block_size = block_size
        self._caching = caching

    def add(self, row: R) -> None:
        """Let a row wait for its turn."""
        insort(self.waiting, row, key=_rank)

    def remove(self, row: R) -> None:
        """Forget a row, wherever it stands, and free what it holds."""
        if row in self.running:
            self._leave(row)
            return
        place = bisect_left(self.waiting, row.rank, key=_rank)
        if place < len(self.waiting) and self.waiting[place] is row:
            del self.waiting[place]

    def park(self, row: R) -> None:
        """Keep a row's slot and blocks but compute nothing for it."""
        self.stepping.pop(row, None)

    def step(self) -> list[R]:
        """Plan a step: the rows that compute in it, each with `planned` tokens."""
        budget = self._step_tokens
        rows: list[R] = []
        preemptions = self.preemptions
        for row in tuple(self.stepping):
            if not budget:
                break
            if preemptions != self.preemptions and row not in self.stepping:
                continue
            want = len(row.ids) - row.computed
            take = want if want < budget else budget
            if row.computed + take > row.capacity and not self._grow(row, row.computed + take):
                continue
            row.planned = take
            budget -= take
            rows.append(row)
        if preemptions != self.preemptions:
            rows = [row for row in rows if row.planned]
        if preemptions == self.preemptions or not rows:
            self._admit(budget, rows)
        return rows

    def admit_paced(self) -> None:
        """Let waiting rows that are in no step begin, as far as they are next."""
        if self.waiting:
            self._admit(0, [])

    def complete(self, row: R) -> bool:
        """Count a row's planned tokens as computed; whether its next token is known now."""
        row.computed += row.planned
        row.planned = 0
        if row.computed >= row.name_at:
            self._name(row)
        return row.computed == len(row.ids)

    def extend(self, row: R) -> bool:
        """Compute what a paced row said last; false where it lost its place for want of blocks."""
        length = len(row.ids)
        if length > row.capacity and not self._grow(row, length):
            return False
        row.planned = length - row.computed
        return self.complete(row)

    def _admit(self, budget: int, rows: list[R]) -> None:
        while self.waiting and len(self.running) < self._slots:
            row = self.waiting[0]
            if not (row.paced or budget) or not self._enter(row, budget):
                return
            del self.waiting[0]
            self.running[row] = None
            if row.paced:
                self.complete(row)
                self.entered.append(row)
                continue
            self.stepping[row] = None
            budget -= row.planned
            rows.append(row)

    def _enter(self, row: R, budget: int) -> bool:
        """Give a waiting row the blocks of its first chunk, with all that the cache has of it."""
        found: list[int] = []
        if self._caching:
            # Never all of it: the last token must be computed to know the next.
            found = self.kv.find(self._names(row, (len(row.ids) - 1) // self._block_size))
        computed = len(found) * self._block_size
        want = len(row.ids) - computed
        take = want if row.paced or want < budget else budget
        self.kv.hold(found)
        taken = self.kv.take(self._blocks_for(computed + take) - len(found))
        if taken is None:
            self.kv.release(found)
            return False
        row.blocks = found + taken
        row.capacity = len(row.blocks) * self._block_size
        row.computed = computed
        row.planned = take
        row.named = len(found)
        row.name_at = computed + self._block_size if self._caching else _NEVER
        if row.cached is None:
            row.cached = computed
        return True

    def _grow(self, row: R, length: int) -> bool:
        """Make room for `length` tokens; false where it is the row itself that had to give way."""
        missing = self._blocks_for(length) - len(row.blocks)
        while True:
            taken = self.kv.take(missing)
            if taken is not None:
                row.blocks += taken
                row.capacity = len(row.blocks) * self._block_size
                return True
            last = max(self.running, key=_rank)
            self._preempt(last)
            if last is row:
                return False

    def _preempt(self, row: R) -> None:
        self.preemptions += 1
        self._leave(row)
        self.add(row)

    def _leave(self, row: R) -> None:
        del self.running[row]
        self.stepping.pop(row, None)
        self.kv.release(row.blocks)
        row.blocks = []
        row.capacity = row.computed = row.planned = row.named = 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _names(self, row: R, count: int) -> Sequence[bytes]:
        """Return the names of a row's first `count` full blocks."""
        size = self._block_size
        names = row.names
        while len(names) < count:
            place = len(names) * size
            before = names[-1] if names else row.root
            names.append(block_name(before, row.ids[place : place + size]))
        return names[:count] if len(names) > count else names

    def _name(self, row: R) -> None:
        full = row.computed // self._block_size
        names = self._names(row, full)
        for place in range(row.named, full):
            self.kv.name(row.blocks[place], names[place])
        row.named = full
        row.name_at = (full + 1) * self._block_size


def _rank(row: Row) -> tuple[int, int]:
    return row.rank
