"""What waits, counted: by every field, within bounds, and nothing is lost in the sums."""

import functools
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingress.admission import CLASSES, Ticket
from ingress.census import PASSED_MAX, Hall, Pace, count
from schemas.subjects import Lane
from schemas.tenant import PriorityClass
from schemas.waiting import ROWS_MAX, Count, CountAnswer, CountQuestion, Field, Mark, Selection, add

MARK = Mark(slots=1, watermark=2, queued=2)


def ticket(
    request: str,
    tenant: str = "a",
    priority_class: PriorityClass = "standard",
    *,
    at_s: float = 0.0,
    prompt_bytes: int = 10,
    lane: Lane = "online",
    partition: int = 0,
    key: str | None = None,
) -> Ticket:
    return Ticket(
        request=request,
        tenant=tenant,
        priority_class=priority_class,
        weight=1,
        cost_tokens=1,
        output_tokens=1,
        prompt_bytes=prompt_bytes,
        arrived_s=at_s,
        give_up_s=at_s + 30,
        lane=lane,
        partition=partition,
        key=key,
    )


def hall(*tickets: Ticket, model: str = "m", left: Pace | None = None, now_s: float = 5.0) -> Hall:
    arrived = Pace()
    for each in tickets:
        arrived.note(each, now_s=each.arrived_s)
    gone = (left or Pace()).recent(now_s=now_s)
    return Hall(model, tickets, MARK, arrived.recent(now_s=now_s), gone)


def counted(*halls: Hall, by: Field = "lane", now_s: float = 5.0, **of: str) -> CountAnswer:
    question = CountQuestion(by=by, of=Selection(**of))
    return count(halls, question, node="n", now_s=now_s)


A = ticket("r1", "alice", "interactive", at_s=1.0, partition=3)
B = ticket("r2", "bob", at_s=2.0, partition=12, prompt_bytes=5, key="k1")
C = ticket("r3", "bob", at_s=0.5, lane="batch", partition=3, key="k2")


@pytest.mark.parametrize(
    ("by", "rows"),
    [
        ("lane", {"online": 2, "batch": 1}),
        ("model", {"m": 2, "n": 1}),
        ("partition", {"3": 2, "12": 1}),
        ("tenant", {"bob": 2, "alice": 1}),
    ],
)
def test_requests_are_counted_by_every_field(by: Field, rows: dict[str, int]) -> None:
    answer = counted(hall(A, B), hall(C, model="n"), by=by)
    assert {name: row.waiting for name, row in answer.rows.items()} == rows
    assert {name: row.waiting for name, row in answer.classes.items()} == {
        "interactive": 1,
        "standard": 2,
        "batch": 0,
    }
    assert answer.marks == {"m": MARK, "n": MARK}
    assert answer.total.waiting == 3


def test_a_row_names_its_oldest_request_and_how_long_that_waits() -> None:
    answer = counted(hall(A, B), hall(C, model="n"), by="tenant")
    assert answer.rows["bob"] == Count(
        waiting=2, oldest_age_s=4.5, oldest="r3", prompt_bytes=15, arrival_per_s=0.2
    )
    assert (answer.total.oldest, answer.total.oldest_age_s) == ("r3", 4.5)


@pytest.mark.parametrize(
    ("of", "requests"),
    [
        ({"tenant": "bob"}, 2),
        ({"model": "n"}, 1),
        ({"tenant": "alice", "model": "n"}, 0),
        ({"request": "r1"}, 1),
        ({"tenant": "bob", "key": "k1"}, 1),
    ],
)
def test_only_what_is_selected_counts(of: dict[str, str], requests: int) -> None:
    answer = counted(hall(A, B), hall(C, model="n"), by="tenant", **of)
    assert answer.total.waiting == sum(row.waiting for row in answer.rows.values()) == requests


def test_rates_are_of_those_who_came_and_left_in_the_last_ten_seconds() -> None:
    left = Pace()
    left.note(ticket("early", "alice"), now_s=1.0)
    for number in range(5):
        left.note(ticket(f"late{number}", "carol"), now_s=12.0)
    answer = counted(hall(A, B, left=left, now_s=12.0), by="tenant", now_s=12.0)
    assert (answer.total.arrival_per_s, answer.total.drain_per_s) == (0.1, 0.5)
    assert set(answer.rows) == {"alice", "bob"}  # of carol's nothing waits


def test_a_rate_that_is_too_high_to_remember_is_taken_over_a_shorter_time() -> None:
    pace = Pace()
    for number in range(2 * PASSED_MAX):
        pace.note(A, now_s=number / 1000)
    now_s = (2 * PASSED_MAX - 1) / 1000
    tickets, span_s = pace.recent(now_s=now_s)
    assert len(tickets) == PASSED_MAX
    assert span_s == pytest.approx(PASSED_MAX / 1000, rel=0.01)
    assert pace.recent(now_s=now_s + 11) == ([], 10.0)


def test_ten_thousand_requests_of_as_many_long_named_tenants_make_a_bounded_answer() -> None:
    long = "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 200
    tickets = [ticket(f"req_{n:032x}", f"{long}{n}", at_s=n / 1000) for n in range(10_000)]
    loud = [ticket(f"req_{n:032x}", "loud") for n in range(10_000, 10_005)]
    answer = counted(hall(*tickets, *loud), by="tenant", now_s=20.0)
    assert len(answer.rows) == ROWS_MAX
    assert next(iter(answer.rows)) == "loud"
    assert answer.rest.waiting == 10_005 - 5 - (ROWS_MAX - 1)
    assert len(msgspec.json.encode(answer)) < 1_000_000


tickets = st.builds(
    ticket,
    st.uuids().map(str),
    st.integers(0, 2 * ROWS_MAX).map(str),
    st.sampled_from(CLASSES),
    at_s=st.floats(0, 5),
    partition=st.integers(0, 31),
)


@given(st.lists(tickets, max_size=20), st.sampled_from(get_args(Field)))
def test_rows_and_rest_add_up_to_the_total(waiting: list[Ticket], by: Field) -> None:
    answer = counted(hall(*waiting), by=by)
    for parts in ((*answer.rows.values(), answer.rest), answer.classes.values()):
        summed = functools.reduce(add, parts, Count())
        for name in ("waiting", "prompt_bytes", "oldest_age_s"):
            assert getattr(summed, name) == getattr(answer.total, name)
    assert answer.total.waiting == len(waiting)
