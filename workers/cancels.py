"""What is no longer wanted. Rule: a signal may come before its request, so it is remembered."""

from typing import Final

TOMBSTONE_S: Final = 30.0


class Tombstones:
    """Requests that were cancelled in the last `TOMBSTONE_S` seconds."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def add(self, request: str, *, now_s: float) -> None:
        """Remember a cancelled request."""
        self._until_s.pop(request, None)  # so that the oldest stay in front
        self._until_s[request] = now_s + TOMBSTONE_S

    def has(self, request: str, *, now_s: float) -> bool:
        """Tell whether the request was cancelled."""
        return self._until_s.get(request, 0.0) > now_s

    def prune(self, *, now_s: float) -> None:
        """Forget the old ones."""
        for request, until_s in list(self._until_s.items()):
            if until_s > now_s:
                return
            del self._until_s[request]
