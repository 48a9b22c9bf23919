"""What several ingress nodes say, summed up and shown; none of it in the queue's own numbers."""

from headrace.backlog import By
from headrace.in_ingress import (
    NO_ANSWER,
    Force,
    InIngress,
    forces_as_json,
    forces_of,
    forces_table,
    place_as_json,
    place_lines,
    summed,
    table,
)
from schemas.model import WorkerEntry
from schemas.waiting import Count, CountAnswer, Mark, Place

BUSY = Mark(slots=1, watermark=2, queued=3)
IDLE = Mark(slots=0, watermark=10_000, queued=0)


def waits(count: int, age_s: float = 0.0, oldest: str | None = None) -> Count:
    return Count(waiting=count, oldest_age_s=age_s, oldest=oldest, prompt_bytes=1024 * count)


ONE = CountAnswer(
    node="one",
    total=waits(5, 3.0, "req_a"),
    rows={"10": waits(3, 3.0, "req_a"), "9": waits(1, 1.0, "req_b")},
    rest=waits(1),
    classes={"interactive": waits(0), "standard": waits(5, 3.0, "req_a")},
    marks={"tiny": BUSY},
)
OTHER = CountAnswer(
    node="other",
    total=waits(4, 7.0, "req_c"),
    rows={"9": waits(4, 7.0, "req_c")},
    classes={"interactive": waits(4, 7.0, "req_c"), "standard": waits(0)},
    marks={"tiny": BUSY, "gone": IDLE},
)


def test_rows_of_all_nodes_are_added_and_their_oldest_is_the_oldest() -> None:
    found = summed([ONE, OTHER], By.PARTITION)
    assert found.rows == {"9": waits(5, 7.0, "req_c"), "10": waits(3, 3.0, "req_a")}
    assert list(found.rows) == ["9", "10"]
    assert (found.nodes, found.total, found.rest) == (2, waits(9, 7.0, "req_c"), waits(1))
    assert found.classes["standard"].waiting == 5
    assert list(summed([ONE, OTHER], By.TENANT).rows) == ["10", "9"]


def test_without_an_answer_what_waits_is_unknown_and_not_nothing() -> None:
    found = summed([], By.LANE)
    assert found == InIngress()
    assert found.as_json(By.LANE) == {
        "nodes": 0,
        "rows": [],
        "rest": None,
        "total": None,
        "classes": [],
    }
    assert table(found, By.LANE) == ["", NO_ANSWER]


def test_the_json_names_each_row_by_what_it_stands_for() -> None:
    shown = summed([ONE], By.PARTITION).as_json(By.PARTITION)
    assert shown["rows"][1] == {
        "partition": "10",
        "waiting": 3,
        "oldest_age_s": 3.0,
        "oldest": "req_a",
        "prompt_bytes": 3072,
        "arrival_per_s": 0.0,
        "drain_per_s": 0.0,
    }
    assert shown["classes"][1]["class"] == "standard"


def test_the_table_stands_apart_and_says_how_many_answered() -> None:
    assert table(summed([ONE, OTHER], By.PARTITION), By.PARTITION) == [
        "",
        "waiting in ingress, not yet in the queue (2 nodes answered)",
        "PARTITION   WAITING     OLDEST       KIB ARRIVAL/S   DRAIN/S  OLDEST ID",
        "9                 5      7.0 s       5.0       0.0       0.0  req_c",
        "10                3      3.0 s       3.0       0.0       0.0  req_a",
        "(others)          1      0.0 s       1.0       0.0       0.0  -",
        "total             9      7.0 s       9.0       0.0       0.0  req_c",
        "by class: interactive 4, standard 5",
    ]
    assert "(1 node answered)" in table(summed([OTHER], By.LANE), By.LANE)[1]


def test_a_tenants_name_cannot_command_the_terminal() -> None:
    answer = CountAnswer(node="n", total=waits(1), rows={"\x1b[2Jx": waits(1)})
    assert "\x1b" not in "".join(table(summed([answer], By.TENANT), By.TENANT))


def test_each_models_live_workers_their_slots_and_its_watermark_are_told() -> None:
    workers = [
        WorkerEntry(name="w1", model="tiny", slots=1),
        WorkerEntry(name="w2", model="tiny", slots=2, draining=True),
        WorkerEntry(name="w3", model="sim", slots=64),
    ]
    forces = forces_of(workers, summed([OTHER], By.LANE))
    assert forces == {
        "gone": Force(0, 0, 10_000),
        "sim": Force(1, 64, None),
        "tiny": Force(1, 1, 2),
    }
    assert forces_as_json(forces)[1] == {
        "model": "sim",
        "workers": 1,
        "slots": 64,
        "watermark": None,
    }
    assert forces_table(forces) == [
        "",
        "MODEL   WORKERS     SLOTS   WATERMARK",
        "gone          0         0       10000",
        "sim           1        64           ?",
        "tiny          1         1           2",
    ]
    assert forces_table({}) == []


def place(mark: Mark) -> Place:
    return Place(
        lane="online",
        model="tiny",
        partition=3,
        tenant="a\x1b",
        priority_class="standard",
        age_s=1.5,
        gives_up_in_s=28.5,
        prompt_bytes=40,
        ahead=2,
        mark=mark,
    )


def test_a_peek_says_where_a_request_waits_and_why() -> None:
    shown = place_as_json("req_1", "gateway-1", place(BUSY))
    assert (shown["state"], shown["ahead"], shown["partition"]) == ("waiting_in_ingress", 2, "3")
    assert (shown["queued"], shown["watermark"], shown["slots"]) == (3, 2, 1)
    text = place_lines("req_1", "gateway-1", place(BUSY))
    assert text[-1].split(maxsplit=1) == [
        "why",
        "3 of the model's requests are queued or run; the watermark of 1 live slots is 2",
    ]
    assert "\x1b" not in "".join(text)


def test_a_peek_says_that_no_worker_is_there_or_that_the_turn_has_come() -> None:
    full = Mark(slots=0, watermark=10_000, queued=10_000)
    assert "no live worker serves the model" in place_lines("r", "n", place(full))[-1]
    assert "about to be let go" in place_lines("r", "n", place(IDLE))[-1]
