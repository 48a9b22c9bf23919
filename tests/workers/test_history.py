"""What the log says of a request: pieces, end, holder, deaths."""

from hypothesis import given
from hypothesis import strategies as st

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
from workers.history import read_history

SHAPE = Shape("chat", "sim", 5, False, 1, False)
USAGE = Usage(1, 1, 0)


def claim(worker: str = "w1", *, resume_at: int | None = 0, attempt: int = 0) -> Started:
    return Started(attempt, worker, resume_at, SHAPE)


def piece(text: str, tokens: int = 1) -> Piece:
    return Piece(0, text, tuple(range(tokens)))


def tokens(attempt: int, seq: int, *texts: str) -> Tokens:
    return Tokens(attempt, seq, tuple(piece(text) for text in texts))


def text_of(frames: list[tuple[int, Frame]], *, attempt: int | None = None) -> str:
    return "".join(piece.text for piece in read_history(frames, attempt=attempt).pieces)


def test_an_empty_log_is_no_past() -> None:
    history = read_history([])
    assert (history.pieces, history.ended, history.holder, history.deaths) == ((), False, None, 0)


def test_pieces_come_in_order_and_repeats_change_nothing() -> None:
    frames: list[tuple[int, Frame]] = [
        (7, claim()),
        (8, tokens(7, 0, "a")),
        (9, tokens(7, 1, "b")),
        (10, tokens(7, 0, "a", "b", "c")),
    ]
    history = read_history(frames)
    assert [piece.text for piece in history.pieces] == ["a", "b", "c"]
    assert history.next_seq == 3
    assert history.holder == "w1"
    assert not history.ended


def test_what_follows_a_hole_is_not_part_of_the_past() -> None:
    frames: list[tuple[int, Frame]] = [(7, claim()), (8, tokens(7, 0, "a")), (9, tokens(7, 2, "c"))]
    assert text_of(frames) == "a"


def test_a_piece_of_several_tokens_takes_several_seqs() -> None:
    frames: list[tuple[int, Frame]] = [
        (7, claim()),
        (8, Tokens(7, 0, (piece("abc", 3),))),
        (9, tokens(7, 3, "d")),
    ]
    assert text_of(frames) == "abcd"
    assert read_history(frames).next_seq == 4


def test_a_later_attempt_owns_the_tokens_from_where_it_began() -> None:
    frames: list[tuple[int, Frame]] = [
        (7, claim()),
        (8, tokens(7, 0, "a", "b", "old")),
        (9, claim("w2", resume_at=None)),
        (10, claim("w2", resume_at=2, attempt=9)),
        (11, tokens(7, 3, "old")),
        (12, tokens(9, 2, "c")),
    ]
    assert text_of(frames) == "abc"
    assert read_history(frames).holder == "w2"


def test_the_readers_own_claim_is_no_part_of_the_past() -> None:
    frames: list[tuple[int, Frame]] = [
        (7, claim()),
        (8, tokens(7, 0, "a", "b")),
        (9, claim("w2", resume_at=None)),
    ]
    history = read_history(frames, attempt=9)
    assert history.holder == "w1"
    assert history.deaths == 1
    assert history.next_seq == 2


def test_a_terminal_frame_ends_unless_a_later_attempt_owns_its_seq() -> None:
    whole: list[tuple[int, Frame]] = [
        (7, claim()),
        (8, Finished(7, 0, (piece("a"),), ("stop",), USAGE, {})),
    ]
    assert read_history(whole).ended
    assert read_history(whole).deaths == 0
    fenced = [whole[0], (8, claim("w2", resume_at=1, attempt=8)), (9, whole[1][1])]
    assert not read_history(fenced).ended
    failed: list[tuple[int, Frame]] = [(7, claim()), (8, Failed(7, 0, (), "x", "y", USAGE))]
    assert read_history(failed).ended


def test_attempts_without_an_end_are_deaths() -> None:
    frames: list[tuple[int, Frame]] = [
        (number, claim(f"w{number}", resume_at=0)) for number in (7, 9, 12)
    ]
    assert read_history(frames).deaths == 3


def test_giving_a_request_back_is_no_death() -> None:
    frames: list[tuple[int, Frame]] = [(7, claim()), (8, Released(7, -1))]
    assert read_history(frames).deaths == 0


def test_an_attempt_that_spoke_after_the_next_had_begun_did_not_die() -> None:
    frozen: list[tuple[int, Frame]] = [
        (7, claim()),
        (9, claim("w2", resume_at=0)),
        (11, Keepalive(7, -1)),
    ]
    assert read_history(frozen).deaths == 1
    assert read_history(frozen, attempt=9).deaths == 1  # what came later is not known to w2 yet


def test_a_claim_that_had_not_begun_killed_nobody() -> None:
    frames: list[tuple[int, Frame]] = [(7, claim()), (9, claim("w2", resume_at=None))]
    assert read_history(frames).deaths == 1
    begun: list[tuple[int, Frame]] = [*frames, (10, claim("w2", resume_at=0, attempt=9))]
    assert read_history(begun).deaths == 2


@st.composite
def two_attempts(draw: st.DrawFn) -> tuple[list[tuple[int, Frame]], str]:
    """A log of two attempts whose tokens are named by attempt, and the text that is right."""
    first = draw(st.integers(0, 8))
    resume_at = draw(st.integers(0, first))
    second = draw(st.integers(0, 8))
    end = resume_at + second
    later: list[Frame] = [Tokens(5, seq, (piece(f"B{seq}."),)) for seq in range(resume_at, end)]
    zombie: list[Frame] = [
        Tokens(1, seq, (piece(f"A{seq}."),))
        for seq in range(first, first + draw(st.integers(0, 4)))
    ]
    frames: list[Frame] = [
        claim(),
        *(Tokens(1, seq, (piece(f"A{seq}."),)) for seq in range(first)),
        claim("w2", resume_at=resume_at, attempt=5),
        *draw(st.permutations(later + zombie)),
    ]
    right = [f"A{seq}." for seq in range(resume_at)] + [f"B{seq}." for seq in range(resume_at, end)]
    return [(number + 1, frame) for number, frame in enumerate(frames)], "".join(right)


@given(two_attempts())
def test_no_token_of_a_fenced_attempt_is_taken_whatever_the_order(
    log: tuple[list[tuple[int, Frame]], str],
) -> None:
    frames, right = log
    assert text_of(frames) == right
