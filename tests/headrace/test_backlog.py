"""Counting the queue: what the broker said goes in, rows come out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backlog import (
    By,
    Mark,
    Rates,
    Row,
    Standing,
    Taken,
    backlog_of,
    epoch_s,
    name_of,
    rates_of,
    table,
)
from schemas.subjects import Cell, RequestSubject

A = Cell("online", "m", "3", "alice")
B = Cell("online", "m", "3", "bob")
C = Cell("batch", "n", "12", "bob")


def standing(*stored: tuple[Cell, int], taken: tuple[Taken, ...] = ()) -> Standing:
    found = Standing()
    for cell, count in stored:
        found.store({f"requests.{'.'.join(cell)}.r{number}": 1 for number in range(count)})
    for each in taken:
        found.take(each)
    return found


def counts(found: Standing, by: By) -> dict[str, tuple[int, int, int]]:
    rows = backlog_of(found, by, oldest_s={}, now_s=0.0).rows
    return {name: row[:3] for name, row in rows.items()}


def test_what_no_consumer_has_delivered_waits() -> None:
    found = standing((A, 2), (B, 3), (C, 1))
    assert counts(found, By.TENANT) == {"alice": (2, 0, 0), "bob": (4, 0, 0)}
    assert counts(found, By.LANE) == {"batch": (1, 0, 0), "online": (5, 0, 0)}
    assert counts(found, By.MODEL) == {"m": (5, 0, 0), "n": (1, 0, 0)}
    assert counts(found, By.PARTITION) == {"3": (5, 0, 0), "12": (1, 0, 0)}


def test_what_a_consumer_has_delivered_runs() -> None:
    found = standing((A, 2), (B, 3), taken=(Taken((A, B, B), redelivered=0),))
    assert counts(found, By.TENANT) == {"alice": (1, 1, 0), "bob": (1, 2, 0)}
    assert counts(found, By.PARTITION) == {"3": (2, 3, 0)}


def test_a_partitions_redelivered_are_its_oldest_running_ones() -> None:
    found = standing((A, 2), (B, 3), taken=(Taken((A, B, B), redelivered=2),))
    assert counts(found, By.TENANT) == {"alice": (1, 1, 1), "bob": (1, 2, 1)}


def test_a_broker_that_counts_redelivered_that_are_gone_is_not_believed() -> None:
    found = standing((A, 2), taken=(Taken((A,), redelivered=9),))
    assert counts(found, By.TENANT) == {"alice": (1, 1, 1)}


def test_what_was_stored_and_taken_after_the_listing_does_not_count() -> None:
    found = standing((A, 1), taken=(Taken((A, A, B), redelivered=0),))
    assert counts(found, By.TENANT) == {"alice": (0, 1, 0)}


def test_foreign_subjects_are_counted_by_themselves() -> None:
    found = standing((A, 1))
    found.store({"requests.junk": 2, "requests.a.b.c.d.e.f": 1})
    assert counts(found, By.TENANT) == {"(foreign)": (3, 0, 0), "alice": (1, 0, 0)}


def test_partitions_are_in_the_order_of_their_numbers_and_not_padded() -> None:
    cells = [Cell("online", "m", str(number), "t") for number in (10, 9, 100, 1)]
    found = standing(*[(cell, 1) for cell in cells])
    assert list(counts(found, By.PARTITION)) == ["1", "9", "10", "100"]


def test_names_are_those_that_users_gave() -> None:
    subject = RequestSubject("online", "org/m.1", 0, "a/b c ü", "r")
    found = Standing()
    found.store({str(subject): 1})
    assert list(counts(found, By.TENANT)) == ["a/b c ü"]
    assert list(counts(found, By.MODEL)) == ["org/m.1"]
    assert name_of("=ZZ") == "=ZZ"


def test_ages_are_those_of_the_oldest_and_the_totals_is_the_highest() -> None:
    found = standing((A, 1), (B, 1))
    backlog = backlog_of(found, By.TENANT, oldest_s={"alice": 10.0, "bob": 4.5}, now_s=12.0)
    assert backlog.rows == {"alice": Row(1, 0, 0, 2.0), "bob": Row(1, 0, 0, 7.5)}
    assert backlog.total == Row(2, 0, 0, 7.5)


def test_an_empty_queue_has_no_rows_and_a_total_of_nothing() -> None:
    backlog = backlog_of(Standing(), By.TENANT, oldest_s={}, now_s=5.0)
    assert backlog.as_json() == {
        "rows": [],
        "total": {"waiting": 0, "running": 0, "redelivered": 0, "oldest_age_s": 0.0},
    }


def test_the_json_names_each_row_by_what_it_stands_for() -> None:
    backlog = backlog_of(standing((C, 1)), By.PARTITION, oldest_s={}, now_s=0.0)
    assert backlog.as_json(Rates(1.0, 2.0, 3.0)) == {
        "rows": [
            {"partition": "12", "waiting": 1, "running": 0, "redelivered": 0, "oldest_age_s": 0.0}
        ],
        "total": {"waiting": 1, "running": 0, "redelivered": 0, "oldest_age_s": 0.0},
        "rates": {"interval_s": 1.0, "arrival_per_s": 2.0, "drain_per_s": 3.0},
    }


@pytest.mark.parametrize(
    ("before", "after", "rates"),
    [
        (Mark(10.0, 5, 100), Mark(12.0, 5, 100), Rates(2.0, 0.0, 0.0)),
        (Mark(10.0, 5, 100), Mark(12.0, 25, 120), Rates(2.0, 10.0, 0.0)),
        (Mark(10.0, 5, 100), Mark(12.0, 0, 100), Rates(2.0, 0.0, 2.5)),
        (Mark(10.0, 5, 100), Mark(12.0, 10, 120), Rates(2.0, 10.0, 7.5)),
        (Mark(10.0, 5, 100), Mark(12.0, 1, 1), Rates(2.0, 0.0, 0.0)),  # a stream made anew
    ],
)
def test_rates_come_from_sequences_and_counts(before: Mark, after: Mark, rates: Rates) -> None:
    assert rates_of(before, after) == rates


def test_the_table_shows_every_row_and_the_total() -> None:
    backlog = backlog_of(standing((A, 2), (B, 1)), By.TENANT, oldest_s={"bob": 1.0}, now_s=3.0)
    assert table(backlog, Rates(1.0, 2.0, 0.5)) == [
        "TENANT   WAITING   RUNNING REDELIVERED     OLDEST",
        "alice          2         0           0      0.0 s",
        "bob            1         0           0      2.0 s",
        "total          3         0           0      2.0 s",
        "arrival 2/s, drain 0.5/s",
    ]


def test_a_tenants_name_cannot_command_the_terminal() -> None:
    found = Standing()
    found.store({str(RequestSubject("online", "m", 0, "\x1b[2Jx", "r")): 1})
    lines = table(backlog_of(found, By.TENANT, oldest_s={}, now_s=0.0))
    assert "\x1b" not in "".join(lines)


def test_the_brokers_times_are_read_to_the_microsecond() -> None:
    assert epoch_s("1970-01-01T00:00:01.123456789Z") == pytest.approx(1.123456)
    assert epoch_s("1970-01-01T00:00:01.45388315Z") == pytest.approx(1.453883)
    assert epoch_s("1970-01-01T02:00:00.5+02:00") == 0.5
    assert epoch_s("1970-01-01T00:00:02Z") == 2.0


cells = st.builds(
    Cell,
    st.sampled_from(["online", "batch"]),
    st.sampled_from(["m", "n"]),
    st.sampled_from(["0", "1", "10"]),
    st.sampled_from(["a", "b", "=2F"]),
)


@given(
    stored=st.dictionaries(cells, st.integers(1, 5)),
    taken=st.lists(st.builds(Taken, st.lists(cells, max_size=8).map(tuple), st.integers(0, 9))),
    by=st.sampled_from(By),
)
def test_waiting_and_running_are_always_what_is_stored(
    stored: dict[Cell, int], taken: list[Taken], by: By
) -> None:
    found = standing(*stored.items(), taken=tuple(taken))
    backlog = backlog_of(found, by, oldest_s={}, now_s=0.0)
    assert backlog.total.waiting + backlog.total.running == sum(stored.values())
    for row in (*backlog.rows.values(), backlog.total):
        assert 0 <= row.redelivered <= row.running
        assert row.waiting >= 0
