"""The states a request passes. Rule: a step that is not in the table is a bug and raises."""

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where a request stands, from its first byte to its settled account."""

    RECEIVED = "received"
    AUTHENTICATED = "authenticated"
    COSTED = "costed"
    RESERVED = "reserved"
    QUEUED = "queued"
    PUBLISHED = "published"
    DELIVERED = "delivered"
    GENERATING = "generating"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SETTLED = "settled"


_ENDS: Final = frozenset({State.FAILED, State.CANCELLED, State.EXPIRED})

_NEXT: Final[dict[State, frozenset[State]]] = {
    State.RECEIVED: frozenset({State.AUTHENTICATED}) | _ENDS,
    State.AUTHENTICATED: frozenset({State.COSTED}) | _ENDS,
    State.COSTED: frozenset({State.RESERVED}) | _ENDS,
    State.RESERVED: frozenset({State.QUEUED}) | _ENDS,
    State.QUEUED: frozenset({State.PUBLISHED}) | _ENDS,
    State.PUBLISHED: frozenset({State.DELIVERED}) | _ENDS,
    # A delivered or running request may be delivered again: that is a further attempt.
    State.DELIVERED: frozenset({State.DELIVERED, State.GENERATING}) | _ENDS,
    State.GENERATING: frozenset({State.DELIVERED, State.FINISHED}) | _ENDS,
    State.FINISHED: frozenset({State.SETTLED}),
    State.FAILED: frozenset({State.SETTLED}),
    State.CANCELLED: frozenset({State.SETTLED}),
    State.EXPIRED: frozenset({State.SETTLED}),
    State.SETTLED: frozenset(),
}


class ImpossibleStep(Exception):
    """A request was moved between two states that do not follow each other."""


def step(state: State, to: State) -> State:
    """Return `to` if it may follow `state`. Raises ImpossibleStep otherwise."""
    if to not in _NEXT[state]:
        raise ImpossibleStep(f"{state} → {to}")
    return to
