"""One reply put in order: frames in, whatever their order; events out, each token once.

Rules. The token at seq s belongs to the highest attempt whose `resume_at` is ≤ s. What was shown
wins: it is never shown again nor taken back. A hole is never skipped: `missing` says that the log
must be read. Pure: no clock, no event loop.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

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
    Usage,
)

EARLY_PIECES_MAX: Final = 4096


class Shown(NamedTuple):
    """The next piece of the reply; `seq` is that of its last token."""

    seq: int
    piece: Piece


class Complete(NamedTuple):
    """The reply is whole; `seq` is the terminal frame's."""

    seq: int
    reasons: tuple[str, ...]
    usage: Usage


class Broken(NamedTuple):
    """The reply ends with an error."""

    code: str
    message: str
    usage: Usage


Event = Shown | Complete | Broken

_new = tuple.__new__  # a NamedTuple's constructor without its function: half the time


class Reply:
    """The state of one reply at its reader."""

    def __init__(self) -> None:
        self.shape: Shape | None = None
        self.ended = False
        self.next_seq = 0
        # Each attempt's first seq, as far as known: an attempt that published s began at s or
        # before, so what we have seen of it bounds it.
        self._resume_at: dict[int, int] = {}
        self._early: dict[int, tuple[int, Piece]] = {}
        self._terminal: tuple[int, int, Finished | Failed] | None = None
        self._last_seqs: dict[int, int] = {}  # how far each attempt says it has come
        self._only: int | None = None  # the attempt, while a single one is known

    @property
    def started(self) -> bool:
        """Whether a worker has begun."""
        return self.shape is not None

    @property
    def missing(self) -> bool:
        """Whether something later than the next token is known: only the log can fill the hole."""
        return not self.ended and (
            bool(self._early)
            or self._terminal is not None
            or any(last_seq >= self.next_seq for last_seq in self._last_seqs.values())
        )

    def take(self, frame: Frame, *, stored_seq: int | None = None) -> Sequence[Event]:
        """Take a frame and return what can be shown now.

        `stored_seq` is the frame's sequence in the log where it was read from there; it numbers
        the claim of an attempt.
        """
        if (
            # What nearly every frame is: the next piece of the only attempt, nothing early.
            type(frame) is Tokens
            and frame[0] == self._only
            and frame[1] == self.next_seq
            and len(frame[2]) == 1
            and not self._early
            and self._terminal is None
        ):
            piece = frame[2][0]
            self.next_seq += len(piece[2])
            return (_new(Shown, (self.next_seq - 1, piece)),)
        if self.ended and not isinstance(frame, Started):
            return ()
        match frame:
            case Tokens(attempt, seq, pieces):
                shown = self._tokens(attempt, seq, pieces)
                return shown if self._terminal is None else [*shown, *self._end()]
            case Finished(attempt, seq, pieces) | Failed(attempt, seq, pieces):
                shown = self._tokens(attempt, seq, pieces)
                end = seq + sum(len(piece.tokens) for piece in pieces)
                self._attempt_at(attempt, end)
                if self._terminal is None or self._terminal[0] <= attempt:
                    self._terminal = (attempt, end, frame)
                return [*shown, *self._end()]
            case Started():
                return self._started(frame, stored_seq)
            case Keepalive(attempt, last_seq) | Released(attempt, last_seq):
                if not (attempt and self._fenced(attempt, last_seq)):
                    self._last_seqs[attempt] = max(last_seq, self._last_seqs.get(attempt, -1))
                return ()

    def _started(self, frame: Started, stored_seq: int | None) -> Sequence[Event]:
        # Even after the end: a reader that came late may learn the shape last, from the log.
        self.shape = frame.shape
        number = frame.attempt or stored_seq
        if self.ended or number is None or frame.resume_at is None:
            return ()
        self._attempt_at(number, frame.resume_at)
        return self._end()

    def _tokens(self, attempt: int, seq: int, pieces: Sequence[Piece]) -> list[Shown]:
        self._attempt_at(attempt, seq)
        shown: list[Shown] = []
        for piece in pieces:
            if seq == self.next_seq:
                if not self._fenced(attempt, seq):
                    self.next_seq = seq + len(piece.tokens)
                    shown.append(Shown(self.next_seq - 1, piece))
                    if self._early:
                        shown.extend(self._follow())
            elif seq > self.next_seq:
                self._keep(attempt, seq, piece)
            seq += len(piece.tokens)
        return shown

    def _follow(self) -> list[Shown]:
        """Return the early pieces that follow now, and forget those that are behind."""
        shown = []
        while (found := self._early.pop(self.next_seq, None)) is not None:
            attempt, piece = found
            if self._fenced(attempt, self.next_seq):
                continue
            self.next_seq += len(piece.tokens)
            shown.append(Shown(self.next_seq - 1, piece))
        for seq in [seq for seq in self._early if seq < self.next_seq]:
            del self._early[seq]
        return shown

    def _keep(self, attempt: int, seq: int, piece: Piece) -> None:
        held = self._early.get(seq)
        if held is None and len(self._early) >= EARLY_PIECES_MAX:
            return  # the log has it
        if held is None or held[0] <= attempt:
            self._early[seq] = (attempt, piece)

    def _end(self) -> Sequence[Event]:
        if self._terminal is None:
            return ()
        attempt, seq, frame = self._terminal
        if self._fenced(attempt, seq):
            self._terminal = None
            return ()
        if seq > self.next_seq:
            return ()
        # Before what was shown, where a worker took over from one that lived: the end is the end.
        seq = max(seq, self.next_seq)
        self.ended = True
        self._early.clear()
        match frame:
            case Finished(_, _, _, reasons, usage):
                return [Complete(seq, reasons, usage)]
            case Failed(_, _, _, code, message, usage):
                return [Broken(code, message, usage)]

    def _attempt_at(self, attempt: int, seq: int) -> None:
        known = self._resume_at.get(attempt)
        if known is None or seq < known:
            self._resume_at[attempt] = seq
            self._only = attempt if len(self._resume_at) == 1 else None
            if self._only is None:
                self._forget_fenced()

    def _forget_fenced(self) -> None:
        """Wait no more for what a lower attempt said beyond the beginning of a higher one."""
        for seq in [seq for seq, (own, _) in self._early.items() if self._fenced(own, seq)]:
            del self._early[seq]
        for own in [own for own, seq in self._last_seqs.items() if own and self._fenced(own, seq)]:
            del self._last_seqs[own]

    def _fenced(self, attempt: int, seq: int) -> bool:
        """Whether a higher attempt owns this seq."""
        if len(self._resume_at) == 1:
            return False
        return any(
            higher > attempt and resume_at <= seq for higher, resume_at in self._resume_at.items()
        )
