"""The last frames of a reply, from which a worker that takes it over hears what was shown. Pure."""

from typing import Final

from schemas.wire import Failed, Finished, Piece, Tokens, decode_frame

FRAMES_MAX: Final = 48  # more than a checkpoint's interval: the log may lack no more


class Recent:
    """So many frames as they came. A list, since a deque takes 0.7 KiB while it is empty."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        self._frames: list[bytes] = []

    def add(self, frame: bytes) -> None:
        """Take a frame that brought something."""
        self._frames.append(frame)
        if len(self._frames) > FRAMES_MAX:
            del self._frames[0]

    def shown(self, have: int, *, next_seq: int) -> Tokens:
        """Return the pieces from seq `have` on and below `next_seq`, as far as they are here, in a
        frame whose `attempt` is `next_seq`."""
        known: dict[int, Piece] = {}
        for data in self._frames:
            frame = decode_frame(data)
            if isinstance(frame, Tokens | Finished | Failed):
                seq = frame.seq
                for piece in frame.pieces:
                    known.setdefault(seq, piece)
                    seq += len(piece.tokens)
        pieces = []
        seq = have
        while seq < next_seq and (piece_at := known.get(seq)) is not None:
            pieces.append(piece_at)
            seq += len(piece_at.tokens)
        return Tokens(next_seq, have, tuple(pieces))
