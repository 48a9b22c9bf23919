"""`headrace backlog` beside what the broker itself says, with nothing of ours running."""

import json
import subprocess
from collections import Counter

import pytest

from headrace import operate
from headrace.bus import Bus
from schemas.subjects import RequestSubject, new_request_id
from tests.broker import with_bus
from tests.json_schema import faults
from tests.queue import (
    NAK,
    ODD_MODEL,
    ODD_TENANT,
    PARTITIONS,
    asked,
    command,
    headrace,
    place,
    pull,
    put,
    stored,
    subjects_of,
)
from tests.servers import ROOT, NatsServer, free_port

SCHEMA = json.loads((ROOT / "docs" / "backlog.schema.json").read_text())


def backlog(url: str, by: str) -> dict[str, tuple[int, int, int]]:
    found = asked(url, "backlog", "--by", by)
    assert faults(found, SCHEMA) == []
    return {row[by]: (row["waiting"], row["running"], row["redelivered"]) for row in found["rows"]}


def test_ten_thousand_waiting_requests_equal_stream_info_by_every_field(url: str) -> None:
    requests = [
        place(tenant=f"tenant-{number % 20}", partition=number * 7 % PARTITIONS)
        for number in range(10_000)
    ]
    stored(url, requests)
    shown = [RequestSubject.parse(subject) for subject in with_bus(url, subjects_of)]
    assert len(shown) == 10_000
    for by in ("tenant", "partition", "model", "lane"):
        told = Counter(str(getattr(subject, by)) for subject in shown)
        assert backlog(url, by) == {name: (count, 0, 0) for name, count in told.items()}


def test_the_total_is_the_streams_messages_and_the_age_of_its_first(url: str) -> None:
    stored(url, [place(tenant=tenant) for tenant in "aab"])
    found = asked(url, "backlog", "--by", "tenant")
    state = with_bus(url, lambda bus: bus.api("STREAM.INFO.REQUESTS"))["state"]
    assert found["total"]["waiting"] == state["messages"] == 3
    ages = {row["tenant"]: row["oldest_age_s"] for row in found["rows"]}
    assert ages["a"] == found["total"]["oldest_age_s"] >= ages["b"] > 0
    assert found["rates"]["interval_s"] > 0


def test_what_a_worker_was_given_runs_until_it_is_acknowledged(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        await put(bus, [place(tenant="a"), place(tenant="b"), place(tenant="a")])
        await put(bus, [place(tenant=ODD_TENANT, model=ODD_MODEL, partition=1, lane="batch")])
        given = await pull(bus, 2)
        await pull(bus, 1, model=ODD_MODEL, partition=1, lane="batch")
        await bus.request(given[0].reply, b"+ACK", timeout_s=5)

    with_bus(url, scenario)
    assert backlog(url, "tenant") == {"a": (1, 0, 0), ODD_TENANT: (0, 1, 0), "b": (0, 1, 0)}
    assert backlog(url, "model") == {"m": (1, 1, 0), ODD_MODEL: (0, 1, 0)}
    assert backlog(url, "partition") == {"0": (1, 1, 0), "1": (0, 1, 0)}
    assert backlog(url, "lane") == {"batch": (0, 1, 0), "online": (1, 1, 0)}


def test_what_was_given_back_and_out_again_is_redelivered(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        await put(bus, [place(tenant="a"), place(tenant="b"), place(tenant="b")])
        first, _ = await pull(bus, 2)
        await bus.request(first.reply, NAK, timeout_s=5)
        (again,) = await pull(bus, 1)
        assert again.subject == first.subject

    with_bus(url, scenario)
    assert backlog(url, "tenant") == {"a": (0, 1, 1), "b": (1, 1, 0)}
    assert backlog(url, "partition") == {"0": (1, 2, 1)}


def test_what_is_purged_while_it_runs_or_waits_counts_no_more(url: str) -> None:
    async def scenario(bus: Bus) -> None:
        requests = [place(tenant=tenant) for tenant in "abcd"]
        await put(bus, requests)
        await pull(bus, 2)
        for gone in (requests[0], requests[3]):
            await bus.purge("REQUESTS", str(gone))

    with_bus(url, scenario)
    assert backlog(url, "tenant") == {"b": (0, 1, 0), "c": (1, 0, 0)}
    assert backlog(url, "lane") == {"online": (1, 1, 0)}


def test_requests_of_a_model_without_consumers_wait(url: str) -> None:
    stored(url, [place(model="nobody's"), place()])
    assert backlog(url, "model") == {"m": (1, 0, 0), "nobody's": (1, 0, 0)}


def test_an_empty_queue_is_shown_as_such(url: str) -> None:
    assert backlog(url, "lane") == {}
    shown = headrace(url, "backlog").stdout.splitlines()
    assert shown[1].split() == ["total", "0", "0", "0", "0.0", "s"]


@pytest.mark.slow
def test_watching_prints_the_backlog_each_second_with_rates(url: str) -> None:
    with subprocess.Popen(
        command("backlog", "--watch", "--json", "--nats-url", url),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as watching:
        try:
            assert watching.stdout is not None
            first = json.loads(watching.stdout.readline())
            stored(url, [place() for _ in range(5)])
            shown = [json.loads(watching.stdout.readline())]
            while shown[-1]["total"]["waiting"] != 5 and len(shown) < 30:
                shown.append(json.loads(watching.stdout.readline()))
            shown.append(json.loads(watching.stdout.readline()))
        finally:
            watching.send_signal(2)
        assert watching.wait(60) == 0
    assert first["total"]["waiting"] == 0
    assert shown[-1]["total"]["waiting"] == 5
    assert sum(each["rates"]["arrival_per_s"] for each in shown) > 0
    assert all(faults(each, SCHEMA) == [] for each in (first, *shown))


def test_a_broker_that_is_away_is_exit_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "CONNECT_TIMEOUT_S", 0.2)
    nowhere = f"nats://127.0.0.1:{free_port()}"
    for args in (
        ["backlog"],
        ["peek", new_request_id()],
        ["cancel", new_request_id()],
        ["purge", "--tenant", "t", "--yes"],
    ):
        result = headrace(nowhere, *args)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "the broker is away" in result.stderr


def test_a_broker_without_our_streams_is_refused(own_nats: NatsServer) -> None:
    result = headrace(own_nats.url, "backlog")
    assert result.exit_code == 1
    assert "stream not found" in result.stderr
