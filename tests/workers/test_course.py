"""Where a request goes on that another worker had begun."""

import msgspec
import pytest

from schemas.wire import Envelope, Parsing, Piece, Sampling, Shape, Structured, pack_tokens
from workers.course import Course, Shown, course_of
from workers.history import History


def envelope(**sampling: object) -> Envelope:
    return Envelope(
        request="req_1",
        tenant="t",
        model="sim",
        reply="replies.s.t.req_1",
        prompt=pack_tokens([1]),
        sampling=Sampling(max_tokens=9, **sampling),  # type: ignore[arg-type]
        shape=Shape("chat", "sim", 5, False, 1, False),
        deadline_s=0.0,
    )


def pieces(first: int, last: int) -> tuple[Piece, ...]:
    return tuple(Piece(0, f"{seq}.", (seq,)) for seq in range(first, last))


def test_it_goes_on_after_the_logs_last_token() -> None:
    found = course_of(envelope(), History(pieces(0, 3)), Shown(3))
    assert (found.course, found.made, found.resume_at) == (Course.GO_ON, pieces(0, 3), 3)


def test_what_the_client_has_seen_beyond_the_log_is_gone_on_from_and_published_again() -> None:
    found = course_of(envelope(), History(pieces(0, 3)), Shown(5, pieces(3, 5)))
    assert (found.course, found.made, found.resume_at) == (Course.GO_ON, pieces(0, 5), 3)


def test_what_was_seen_and_is_nowhere_any_more_cannot_be_gone_on_from() -> None:
    found = course_of(envelope(), History(pieces(0, 3)), Shown(6, pieces(3, 5)))
    assert found.course is Course.LOST


def test_a_silent_streamer_may_have_shown_all_that_the_log_holds() -> None:
    assert course_of(envelope(), History(pieces(0, 3)), None).course is Course.GO_ON
    assert course_of(envelope(n=2), History(pieces(0, 3)), None).course is Course.LOST


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 2},
        {"presence_penalty": 1.0},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 5},
        {"bad_words": ("a",)},
        {"stop": ("a",), "include_stop_str_in_output": True},
        {"structured": Structured(json_object=True)},
    ],
)
def test_where_going_on_would_be_wrong_it_begins_anew_only_if_nothing_was_seen(
    sampling: dict[str, object],
) -> None:
    anew = course_of(envelope(**sampling), History(pieces(0, 3)), Shown(0))
    assert (anew.course, anew.made, anew.resume_at) == (Course.ANEW, (), 0)
    seen = course_of(envelope(**sampling), History(pieces(0, 3)), Shown(1))
    assert seen.course is Course.LOST


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1},
        {"presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {1: 2.0}},
        {"stop": ("a",), "stop_token_ids": (5,), "ignore_eos": True},
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
    ],
)
def test_what_needs_no_past_is_gone_on_with(sampling: dict[str, object]) -> None:
    found = course_of(envelope(**sampling), History(pieces(0, 3)), Shown(3))
    assert found.course is Course.GO_ON


def test_what_a_parser_reads_is_not_gone_on_with() -> None:
    parsed = msgspec.structs.replace(envelope(), parsing=Parsing())
    assert course_of(parsed, History(pieces(0, 3)), Shown(1)).course is Course.LOST
    assert course_of(parsed, History(pieces(0, 3)), Shown(0)).course is Course.ANEW


def test_tool_calls_are_not_gone_on_with() -> None:
    called = (Piece(0, "", (1,), None, {"tool_calls": []}),)
    assert course_of(envelope(), History(called), Shown(1)).course is Course.LOST


def test_a_request_that_made_nothing_yet_just_runs() -> None:
    for shown in (None, Shown(0)):
        found = course_of(envelope(n=3), History(), shown)
        assert (found.course, found.made, found.resume_at) == (Course.GO_ON, (), 0)


def test_three_deaths_are_enough() -> None:
    assert course_of(envelope(), History(deaths=2), None).course is Course.GO_ON
    assert course_of(envelope(), History(deaths=3), None).course is Course.DEADLY
