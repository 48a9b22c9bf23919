"""What is kept of a log: its replay is equal, event by event, without the repeats."""

from schemas.reply import Reply
from schemas.wire import (
    Failed,
    Finished,
    Frame,
    Keepalive,
    Piece,
    Shape,
    Started,
    Tokens,
    Usage,
    decode_frame,
)
from streamer.chunks import Chunks
from streamer.sse import EventLines
from workers.history import read_history
from workers.keeping import FRAME_PIECES, compact

SHAPE = Shape("chat", "sim", 5, True, 1, False)
USAGE = Usage(3, 4, 1)


def pieces(first: int, end: int) -> tuple[Piece, ...]:
    """Pieces of one or two tokens."""
    return tuple(Piece(0, f"t{n} ", tuple(range(1 + n % 2))) for n in range(first, end))


def finished(attempt: int, seq: int, more: tuple[Piece, ...] = ()) -> Finished:
    return Finished(attempt, seq, more, ("stop",), USAGE, {"total_ms": 1.0})


def sse(frames: list[tuple[int, Frame]]) -> bytes:
    reply = Reply()
    events = [event for seq, frame in frames for event in reply.take(frame, stored_seq=seq)]
    assert reply.ended
    return EventLines(Chunks("req_1", SHAPE)).render(events)


def test_the_stream_of_a_kept_answer_is_equal_byte_for_byte() -> None:
    log: list[tuple[int, Frame]] = [
        (7, Started(0, "w", 0, SHAPE)),
        (8, Tokens(7, 0, pieces(0, 1))),
        (9, Tokens(7, 1, pieces(1, 2))),
        (10, Keepalive(7, 2)),
        (11, Tokens(7, 0, pieces(0, 4))),
        (12, finished(7, 6, pieces(4, 6))),
    ]
    kept = compact(read_history(log))
    assert kept is not None
    assert len(kept) == 3
    assert sse([(0, decode_frame(raw)) for raw in kept]) == sse(log)


def test_of_two_attempts_the_winners_pieces_and_end_are_kept() -> None:
    log: list[tuple[int, Frame]] = [
        (7, Started(0, "dead", 0, SHAPE)),
        (8, Tokens(7, 0, pieces(0, 2))),
        (9, Started(0, "w", None, SHAPE)),
        (10, Started(9, "w", 3, SHAPE)),
        (11, Tokens(7, 3, (Piece(0, "fenced", (1,)),))),
        (12, finished(7, 4)),
        (13, Tokens(9, 3, pieces(2, 4))),
        (14, finished(9, 6)),
    ]
    kept = compact(read_history(log))
    assert kept is not None
    assert sse([(0, decode_frame(raw)) for raw in kept]) == sse(log)
    assert b"fenced" not in b"".join(kept)


def test_a_long_answers_frames_are_of_bounded_length() -> None:
    whole = tuple(Piece(0, "x", (1,)) for _ in range(1000))
    log: list[tuple[int, Frame]] = [
        (7, Started(0, "w", 0, SHAPE)),
        (8, Tokens(7, 0, whole)),
        (9, finished(7, 1000)),
    ]
    kept = compact(read_history(log))
    assert kept is not None
    frames = [decode_frame(raw) for raw in kept]
    assert [len(f.pieces) for f in frames if isinstance(f, Tokens)] == [FRAME_PIECES] * 3 + [232]
    assert sse([(0, frame) for frame in frames]) == sse(log)


def test_an_error_is_kept_with_what_was_made_before_it() -> None:
    failed = Failed(7, 1, (), "engine_error", "why", USAGE)
    kept = compact(
        read_history([(7, Started(0, "w", 0, SHAPE)), (8, Tokens(7, 0, pieces(0, 1))), (9, failed)])
    )
    assert kept is not None
    assert decode_frame(kept[-1]) == failed


def test_a_log_that_is_not_whole_or_not_ended_is_not_kept() -> None:
    started: tuple[int, Frame] = (7, Started(0, "w", 0, SHAPE))
    assert compact(read_history([started])) is None
    assert compact(read_history([started, (9, finished(7, 3))])) is None
    assert compact(read_history([(9, finished(7, 0))])) is None
