"""What the log says of a request. Rule: the token at seq s belongs to the highest attempt whose
`resume_at` is ≤ s; a repeat changes nothing. Pure.

Deaths are counted from the log too: an attempt that ended without a terminal frame died, unless it
gave the request back, or spoke after a later attempt had begun (it was frozen, or cut off).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from schemas.wire import (
    Failed,
    Finished,
    Frame,
    Keepalive,
    Piece,
    Released,
    Shape,
    Started,
    Tokens,
    span,
)


class Fate(StrEnum):
    """How an attempt ended: dead as long as the log does not say otherwise."""

    DIED = "died"
    ENDED = "ended"  # with the request
    RELEASED = "released"  # given back by a worker that stopped
    OUTLIVED = "outlived"  # frozen or cut off: it spoke after a later attempt had begun


@dataclass(frozen=True, slots=True)
class History:
    """A request's past: its pieces from seq 0 without a hole, and how its attempts went."""

    pieces: tuple[Piece, ...] = ()
    holder: str | None = None
    deaths: int = 0
    """Attempts that died while they ran: a claim that had not begun yet can have killed nobody."""
    latest: int = 0
    """The last attempt, 0 for none; it is the holder's."""
    shape: Shape | None = None
    end: Finished | Failed | None = None

    @property
    def ended(self) -> bool:
        """Whether a terminal frame is there."""
        return self.end is not None

    @property
    def next_seq(self) -> int:
        """The seq after the last piece."""
        return span(self.pieces)


def read_history(frames: Sequence[tuple[int, Frame]], *, attempt: int | None = None) -> History:
    """Return the history that frames with their sequences in the log tell.

    `attempt` is the reader's own claim: the past is what earlier attempts did.
    """
    past = [
        (stored, frame)
        for stored, frame in frames
        if attempt is None or attempt_of(stored, frame) < attempt
    ]
    begins = _begins(past)
    holder, shape, end, latest = None, None, None, 0
    for stored, frame in past:
        if isinstance(frame, Started) and attempt_of(stored, frame) >= latest:
            holder, shape, latest = frame.worker, frame.shape, attempt_of(stored, frame)
        elif isinstance(frame, Finished | Failed) and not _is_fenced(frame, begins):
            end = frame
    return History(
        pieces=_pieces(past, begins),
        holder=holder,
        deaths=sum(fate is Fate.DIED and number in begins for number, fate in fates(past).items()),
        latest=latest,
        shape=shape,
        end=end,
    )


def attempt_of(stored: int, frame: Frame) -> int:
    """Return a frame's attempt; the log numbers a claim."""
    return frame.attempt or stored


def _begins(frames: Iterable[tuple[int, Frame]]) -> dict[int, int]:
    """Return each attempt's first seq, as far as the log tells."""
    begins: dict[int, int] = {}
    for stored, frame in frames:
        match frame:
            case Started(_, _, resume_at) if resume_at is not None:
                seq = resume_at
            case Tokens() | Finished() | Failed():
                seq = frame.seq
            case _:
                continue
        number = attempt_of(stored, frame)
        begins[number] = min(seq, begins.get(number, seq))
    return begins


def _fenced(begins: dict[int, int], attempt: int, seq: int) -> bool:
    return any(other > attempt and first <= seq for other, first in begins.items())


def _pieces(frames: Iterable[tuple[int, Frame]], begins: dict[int, int]) -> tuple[Piece, ...]:
    found: dict[int, Piece] = {}
    for _, frame in frames:
        if not isinstance(frame, Tokens | Finished | Failed):
            continue
        seq = frame.seq
        for piece in frame.pieces:
            if not _fenced(begins, frame.attempt, seq):
                found[seq] = piece
            seq += len(piece.tokens)
    pieces = []
    seq = 0
    while (piece_at := found.get(seq)) is not None:
        pieces.append(piece_at)
        seq += len(piece_at.tokens)
    return tuple(pieces)


def _is_fenced(end: Finished | Failed, begins: dict[int, int]) -> bool:
    return _fenced(begins, end.attempt, end.seq + span(end.pieces))


def fates(frames: Iterable[tuple[int, Frame]]) -> dict[int, Fate]:
    """Return how each attempt that began ended, by its number, in the order of their beginnings."""
    found: dict[int, Fate] = {}
    latest = 0
    for stored, frame in frames:
        number = attempt_of(stored, frame)
        match frame:
            case Started():
                found.setdefault(number, Fate.DIED)
                latest = max(latest, number)
            case Finished() | Failed() if number in found:
                found[number] = Fate.ENDED
            case Released() if number in found:
                found[number] = Fate.RELEASED
            case Tokens() | Keepalive() if number < latest and found.get(number) is Fate.DIED:
                found[number] = Fate.OUTLIVED
            case _:
                continue
    return found
