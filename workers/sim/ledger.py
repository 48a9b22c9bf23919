"""What the engine did for each request, for tests to ask. Rule: the last 10,000 requests only."""

from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Final

ENTRIES_MAX: Final = 10_000


@dataclass(slots=True)
class Entry:
    """How often a request was started and aborted here, and the tokens made for it."""

    starts: int = 0
    aborts: int = 0
    tokens: int = 0


class Ledger:
    """Entries by request id, the latest started last."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def start(self, request: str) -> Entry:
        """Count a start and return the entry, to be kept up to date."""
        entry = self._entries.setdefault(request, Entry())
        self._entries.move_to_end(request)
        entry.starts += 1
        if len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)
        return entry

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return all entries as JSON has them."""
        return {request: asdict(entry) for request, entry in self._entries.items()}
