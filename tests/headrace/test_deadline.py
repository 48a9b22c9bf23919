"""How a request's time is said, and the bounds of it."""

import time

import pytest

from headrace.deadline import is_timeout, time_to_live, timeout_s_of
from schemas.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 600), ("840", 840), ("0.25", 0.25), ("007", 7), ("1.5", 1.5)]
)
def test_a_header_is_decimal_seconds_and_none_is_the_default(
    text: str | None, seconds: float
) -> None:
    assert timeout_s_of(text) == seconds


WRONG = ["", "0", "0.0", "-1", "+1", "840.1", "1e2", ".5", "5.", "inf", "nan", "٣", " 5", "9" * 400]


@pytest.mark.parametrize("text", WRONG)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        timeout_s_of(text)
    assert (refused.value.status, refused.value.param) == (400, "x-request-timeout")


@pytest.mark.parametrize("seconds", [0, -1, 840.001, float("inf"), float("nan")])
def test_no_time_at_all_and_too_much_are_none(seconds: float) -> None:
    assert not is_timeout(seconds)


@pytest.mark.parametrize(("left_s", "said"), [(100.0, "100"), (0.2, "1"), (-5.0, "1")])
def test_the_broker_is_told_whole_seconds_and_at_least_one(left_s: float, said: str) -> None:
    assert time_to_live(time.time() + left_s)["Nats-TTL"] == said
