"""One reply put in order: each token once, whatever happens to the frames on their way."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.reply import Broken, Complete, Event, Reply, Shown
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

SHAPE = Shape("chat", "m", 5, False, 1, False)
USAGE = Usage(3, 4, 0)
A, B = 10, 20  # attempts, as the log numbers them


def word(attempt: int, seq: int) -> Piece:
    """Return a token that tells whose it is."""
    return Piece(0, f"{attempt}:{seq} ", (seq,))


def tokens(attempt: int, first: int, end: int) -> Tokens:
    return Tokens(attempt, first, tuple(word(attempt, seq) for seq in range(first, end)))


def finished(attempt: int, seq: int, first: int | None = None) -> Finished:
    pieces = () if first is None else tokens(attempt, first, seq).pieces
    return Finished(attempt, seq if first is None else first, pieces, ("stop",), USAGE, {})


def started(attempt: int = 0, resume_at: int | None = 0) -> Started:
    return Started(attempt, "w", resume_at, SHAPE)


def feed(reply: Reply, frames: Sequence[Frame]) -> list[Event]:
    return [event for frame in frames for event in reply.take(frame)]


def texts(events: Sequence[Event]) -> str:
    return "".join(event.piece.text for event in events if isinstance(event, Shown))


def says(*parts: tuple[int, int, int]) -> str:
    """Return what is shown when each attempt owns its range."""
    return "".join(
        word(attempt, seq).text for attempt, first, end in parts for seq in range(first, end)
    )


def test_frames_in_order_are_shown_at_once() -> None:
    reply = Reply()
    assert feed(reply, [started()]) == []
    assert reply.shape == SHAPE
    assert feed(reply, [tokens(A, 0, 1)]) == [Shown(0, word(A, 0))]
    assert feed(reply, [tokens(A, 1, 3)]) == [Shown(1, word(A, 1)), Shown(2, word(A, 2))]
    assert not reply.missing
    assert feed(reply, [finished(A, 3)]) == [Complete(3, ("stop",), USAGE)]
    assert reply.ended


def test_an_early_frame_waits_for_the_one_before() -> None:
    reply = Reply()
    assert feed(reply, [tokens(A, 1, 2)]) == []
    assert reply.missing
    assert texts(feed(reply, [tokens(A, 0, 1)])) == says((A, 0, 2))
    assert not reply.missing


def test_a_checkpoint_shows_only_what_is_new() -> None:
    reply = Reply()
    feed(reply, [tokens(A, 0, 3)])
    assert texts(feed(reply, [tokens(A, 0, 5)])) == says((A, 3, 5))


def test_a_terminal_frame_brings_its_last_pieces() -> None:
    reply = Reply()
    feed(reply, [tokens(A, 0, 2)])
    events = feed(reply, [finished(A, 4, first=1)])
    assert texts(events) == says((A, 2, 4))
    assert events[-1] == Complete(4, ("stop",), USAGE)


def test_a_terminal_frame_never_jumps_a_hole() -> None:
    reply = Reply()
    assert feed(reply, [tokens(A, 0, 2), finished(A, 4)])[-1] == Shown(1, word(A, 1))
    assert reply.missing
    assert not reply.ended
    events = feed(reply, [tokens(A, 2, 4)])
    assert texts(events) == says((A, 2, 4))
    assert events[-1] == Complete(4, ("stop",), USAGE)


def test_a_failure_is_shown_after_its_tokens() -> None:
    reply = Reply()
    events = feed(reply, [Failed(A, 0, tokens(A, 0, 2).pieces, "engine_error", "why", USAGE)])
    assert texts(events) == says((A, 0, 2))
    assert events[-1] == Broken("engine_error", "why", USAGE)
    assert reply.ended


def test_nothing_follows_the_end() -> None:
    reply = Reply()
    feed(reply, [tokens(A, 0, 1), finished(A, 1)])
    late = [
        tokens(A, 1, 3),
        finished(A, 1),
        finished(B, 5, first=0),
        started(B, 0),
        Keepalive(A, 9),
    ]
    assert feed(reply, late) == []
    assert not reply.missing


def test_a_reply_without_tokens_ends() -> None:
    assert feed(Reply(), [started(), finished(A, 0)]) == [Complete(0, ("stop",), USAGE)]


def test_a_keepalive_tells_of_tokens_that_never_came() -> None:
    reply = Reply()
    feed(reply, [tokens(A, 0, 2), Keepalive(A, 1)])
    assert not reply.missing
    feed(reply, [Keepalive(A, 4)])
    assert reply.missing
    feed(reply, [tokens(A, 2, 5)])
    assert not reply.missing


def test_a_keepalive_before_the_first_token_is_no_hole() -> None:
    reply = Reply()
    feed(reply, [started(), Keepalive(A, -1)])
    assert not reply.missing


def test_what_a_dead_attempt_said_beyond_the_next_ones_beginning_is_no_hole() -> None:
    reply = Reply()
    feed(reply, [started(A), tokens(A, 0, 2), Keepalive(A, 5), tokens(A, 7, 8)])
    assert reply.missing
    feed(reply, [started(B, resume_at=2)])
    assert not reply.missing
    feed(reply, [Keepalive(A, 9), Released(A, 9)])
    assert not reply.missing
    events = feed(reply, [tokens(B, 2, 9), finished(B, 9)])
    assert texts(events) == "20:2 20:3 20:4 20:5 20:6 20:7 20:8 "
    assert reply.ended


def test_an_end_before_what_was_shown_is_an_end_all_the_same() -> None:
    reply = Reply()
    feed(reply, [started(A), tokens(A, 0, 5)])
    failed = Failed(B, 3, (), "worker_lost", "gone", USAGE)
    assert feed(reply, [started(B, resume_at=3), failed]) == [Broken("worker_lost", "gone", USAGE)]
    other = Reply()
    feed(other, [started(A), tokens(A, 0, 5), started(B, resume_at=3)])
    [end] = feed(other, [finished(B, 4)])
    assert isinstance(end, Complete)
    assert end.seq == 5  # ids only rise


def test_a_claim_in_the_log_is_numbered_by_it() -> None:
    reply = Reply()
    reply.take(tokens(A, 0, 2))
    reply.take(started(0, resume_at=2), stored_seq=B)
    assert reply.take(tokens(A, 2, 3)) == []
    assert texts(reply.take(tokens(B, 2, 3))) == says((B, 2, 3))


def test_a_claim_that_has_not_read_the_log_fences_nothing() -> None:
    reply = Reply()
    reply.take(started(0, resume_at=None), stored_seq=B)
    assert texts(reply.take(tokens(A, 0, 2))) == says((A, 0, 2))


def test_the_old_attempts_end_is_fenced_by_the_new_one() -> None:
    reply = Reply()
    feed(reply, [tokens(A, 0, 3), tokens(B, 3, 4)])
    assert feed(reply, [finished(A, 5, first=4)]) == []
    events = feed(reply, [finished(B, 6, first=4)])
    assert texts(events) == says((B, 4, 6))
    assert events[-1] == Complete(6, ("stop",), USAGE)


def test_an_early_end_is_taken_back_by_a_higher_attempt() -> None:
    reply = Reply()
    feed(reply, [tokens(A, 0, 2), finished(A, 5)])
    events = feed(reply, [started(B, 2), tokens(B, 2, 6), finished(B, 6)])
    assert texts(events) == says((B, 2, 6))
    assert events[-1] == Complete(6, ("stop",), USAGE)


def test_what_was_shown_is_never_shown_again_by_a_higher_attempt() -> None:
    reply = Reply()
    feed(reply, [tokens(A, 0, 4)])
    events = feed(reply, [tokens(B, 2, 6)])
    assert texts(events) == says((B, 4, 6))


def test_early_pieces_are_bounded() -> None:
    reply = Reply()
    for seq in range(1, 10_000):
        reply.take(tokens(A, seq, seq + 1))
    shown = reply.take(tokens(A, 0, 1))
    assert 4096 <= len(shown) < 9_999
    assert reply.next_seq == len(shown)


@st.composite
def one_attempt(draw: st.DrawFn) -> tuple[int, list[Frame]]:
    """An attempt's frames, cut anywhere, some twice, some checkpoints, in any order."""
    end = draw(st.integers(0, 20))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, end - 1)))) | {0, end})
    cuts = [cut for cut in cuts if cut <= end]
    frames: list[Frame] = [tokens(A, first, last) for first, last in itertools.pairwise(cuts)]
    ranges = st.lists(st.tuples(st.integers(0, end), st.integers(0, end)), max_size=4)
    frames += [tokens(A, min(pair), max(pair)) for pair in draw(ranges)]
    frames.append(finished(A, end, first=draw(st.none() | st.integers(0, end))))
    frames += [started(0, 0), Keepalive(A, draw(st.integers(-1, end - 1)))]
    frames += draw(st.lists(st.sampled_from(frames), max_size=6))
    return end, draw(st.permutations(frames))


@given(one_attempt())
def test_any_order_and_repeats_show_each_token_once_in_order(
    case: tuple[int, list[Frame]],
) -> None:
    end, frames = case
    reply = Reply()
    events = feed(reply, frames)
    assert texts(events) == says((A, 0, end))
    assert [event.seq for event in events] == [*range(end), end]
    assert [event for event in events if not isinstance(event, Shown)] == [
        Complete(end, ("stop",), USAGE)
    ]
    assert reply.ended


@st.composite
def two_attempts(draw: st.DrawFn) -> tuple[int, int, list[Frame]]:
    """A dies anywhere; B resumes where A's log ends or before, and finishes."""
    made = draw(st.integers(0, 12))  # what A made
    resume_at = draw(st.integers(0, made))
    end = draw(st.integers(resume_at, 20))
    frames: list[Frame] = [tokens(A, seq, seq + 1) for seq in range(made)]
    frames += [tokens(B, seq, seq + 1) for seq in range(resume_at, end)]
    frames += [started(A, 0), started(B, resume_at), finished(B, end, first=resume_at)]
    if draw(st.booleans()):
        frames.append(finished(A, made))
    frames += draw(st.lists(st.sampled_from(frames), max_size=6))
    return resume_at, end, draw(st.permutations(frames))


@given(two_attempts())
def test_two_attempts_in_any_order_never_show_two_versions_of_a_token(
    case: tuple[int, int, list[Frame]],
) -> None:
    _, _, frames = case
    reply = Reply()
    events = feed(reply, frames)
    shown = [event for event in events if isinstance(event, Shown)]
    assert [event.seq for event in shown] == list(range(len(shown)))
    assert [event.piece.tokens for event in shown] == [(seq,) for seq in range(len(shown))]
    assert sum(not isinstance(event, Shown) for event in events) <= 1
    if any(not isinstance(event, Shown) for event in events):
        assert not isinstance(events[-1], Shown)


@given(two_attempts())
def test_once_its_claim_is_known_the_highest_attempt_owns_all_from_there(
    case: tuple[int, int, list[Frame]],
) -> None:
    resume_at, end, frames = case
    reply = Reply()
    feed(reply, [started(A, 0), started(B, resume_at)])
    events = feed(reply, frames)
    assert texts(events) == says((A, 0, resume_at), (B, resume_at, end))
    assert events[-1] == Complete(end, ("stop",), USAGE)


@given(two_attempts())
def test_two_readers_that_read_the_log_see_the_same(case: tuple[int, int, list[Frame]]) -> None:
    resume_at, end, frames = case
    reply = Reply()
    live = feed(reply, [frame for frame in frames if not isinstance(frame, Started)])
    replayed = feed(Reply(), [started(A, 0), started(B, resume_at), *frames])
    shown = [event for event in live if isinstance(event, Shown)]
    # What came live before B was known may be A's; from B's first token on it is B's for ever.
    owners = [event.piece.text.split(":")[0] for event in shown]
    first_b = owners.index(str(B)) if str(B) in owners else len(owners)
    assert set(owners[first_b:]) <= {str(B)}
    assert texts(replayed) == says((A, 0, resume_at), (B, resume_at, end))


@pytest.mark.parametrize("attempts", [(A, B), (B, A)])
def test_a_tie_of_early_tokens_goes_to_the_highest_attempt(attempts: tuple[int, int]) -> None:
    reply = Reply()
    first, second = attempts
    feed(reply, [tokens(first, 1, 3), tokens(second, 1, 3)])
    assert texts(feed(reply, [tokens(A, 0, 1)])) == says((A, 0, 1), (B, 1, 3))


def test_a_piece_of_several_tokens_takes_as_many_seqs() -> None:
    reply = Reply()
    wide = Piece(0, "abc", (1, 2, 3))
    assert feed(reply, [Tokens(A, 0, (wide, word(A, 3)))]) == [Shown(2, wide), Shown(3, word(A, 3))]
    assert feed(reply, [Tokens(A, 0, (wide, word(A, 3)))]) == []
    assert feed(reply, [finished(A, 4)]) == [Complete(4, ("stop",), USAGE)]
