"""What waits in several ingress, seen and ended from anywhere: by operators, and by its own tenant.

The model `tiny` has one slot. While it and the queue behind it are full, further requests wait in
the ingress that they came to.
"""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from headrace import inquire
from schemas.subjects import new_request_id
from tests.broker import with_bus
from tests.json_schema import faults
from tests.pipeline.asking import CHAT, chat, refusal
from tests.pipeline.conftest import Mode
from tests.pipeline.metered import LONG, SOON_S, Metered, key_of, metered
from tests.queue import asked, headrace, subjects_of
from tests.servers import ROOT, freeze
from tests.talk import talking
from tests.waiting import wait_for

SCHEMA = json.loads((ROOT / "docs" / "backlog.schema.json").read_text())
TERMS = {
    "free": "",
    "first": "",
    "single": "concurrent_requests = 1",
    "last": 'priority_class = "batch"',
    "bulk": 'priority_class = "batch"',
    "other": "",
}
FIELDS = ("lane", "model", "partition", "tenant")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def house(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    models = {"tiny": '{"max_num_seqs": 1}'}
    folder = tmp_path_factory.mktemp("waiting")
    patience = ("--queue-patience-s", "300")  # longer than a test takes
    with metered(mode, folder, tenants=TERMS, models=models, doors=2, every=patience) as found:
        yield found


@contextmanager
def patient(answer_s: float = 20.0) -> Iterator[None]:
    """Have operators wait for answers, in a block, for longer than a busy machine keeps a node from
    giving one: for what cannot be asked again, and what ends with the first good answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inquire, "ANSWER_S", answer_s)
        yield


class Waiting:
    """Requests that wait while `tiny` is full; their answers come in the end."""

    def __init__(self, house: Metered, threads: ThreadPoolExecutor) -> None:
        self._house = house
        self._threads = threads

    def send(self, tenant: str, door: int, *, key: str | None = None) -> "Future[httpx.Response]":
        """Send a request, with the tenant's own key or another, and return once it waits."""
        before = self._house.waiting()

        def ask() -> httpx.Response:
            headers = {"authorization": f"Bearer {key or key_of(tenant)}"}
            with self._house.client(tenant, door) as client:
                body = chat(model="tiny", max_tokens=5)
                return client.post(CHAT, json=body, headers=headers)

        answer = self._threads.submit(ask)
        wait_for(lambda: self._house.waiting() == before + 1, within_s=15, what="one more")
        return answer


@contextmanager
def waiting(house: Metered) -> Iterator[Waiting]:
    """Fill the model and both lanes for a block; what waits at its end is ended."""
    with (
        ThreadPoolExecutor() as threads,
        house.full("tiny"),
        house.sent("bulk", chat(model="tiny"), -1),
    ):
        sent = 1 + 3 * len(house.doors) + 1

        def stands() -> bool:
            there = with_bus(house.nats_url, subjects_of)
            lanes = {subject.split(".")[1] for subject in there}
            return "batch" in lanes and house.waiting() + sum(there.values()) == sent

        wait_for(stands, within_s=15, what="all that was sent")
        yield Waiting(house, threads)
        headrace(house.nats_url, "purge", "--model", "tiny", "--yes")


def queued(house: Metered) -> int:
    return sum(with_bus(house.nats_url, subjects_of).values())


def backlog(house: Metered, by: str = "tenant", *, nodes: int | None = None) -> dict[str, Any]:
    """Return the backlog once all doors have answered in time, or so many `nodes`."""
    found: dict[str, Any] = {}

    def whole() -> bool:
        found.update(asked(house.nats_url, "backlog", "--by", by))
        assert faults(found, SCHEMA) == []
        return bool(found["ingress"]["nodes"] == (len(house.doors) if nodes is None else nodes))

    wait_for(whole, within_s=0.3, what=lambda: f"all answers, with {found['ingress']}")
    return found


def row_of(house: Metered, tenant: str) -> dict[str, Any]:
    [row] = [row for row in backlog(house)["ingress"]["rows"] if row["tenant"] == tenant]
    return dict(row)


def is_cancelled(answer: "Future[httpx.Response]") -> bool:
    return refusal(answer.result(timeout=30))["code"] == "request_cancelled"


def test_what_waits_in_every_ingress_is_seen_by_every_field_apart_from_the_queue(
    house: Metered,
) -> None:
    with waiting(house) as clients:
        clients.send("first", 0)
        clients.send("last", -1)
        for by in FIELDS:
            shown = backlog(house, by)
            there = shown["ingress"]
            assert there["nodes"] == len(house.doors)
            assert there["total"]["waiting"] == house.waiting()
            assert sum(row["waiting"] for row in there["rows"]) == house.waiting()
            assert (shown["total"]["waiting"], shown["total"]["running"]) != (0, 0)
        by_tenant = {row["tenant"]: row["waiting"] for row in backlog(house)["ingress"]["rows"]}
        assert (by_tenant["first"], by_tenant["last"]) == (1, 1)
        by_class = {row["class"]: row["waiting"] for row in backlog(house)["ingress"]["classes"]}
        assert by_class == {"interactive": 0, "standard": house.waiting() - 1, "batch": 1}
        served = [{"model": "tiny", "workers": 1, "slots": 1, "watermark": 2}]
        wait_for(lambda: backlog(house)["models"] == served, within_s=0.3, what="its worker")
        wait_for(
            lambda: (
                f"({len(house.doors)} nodes answered)"
                in headrace(house.nats_url, "backlog", "--by", "tenant").stdout
            ),
            within_s=0.3,
            what="all answers",
        )


def test_metrics_tell_the_same_by_model_class_and_age(house: Metered) -> None:
    with waiting(house) as clients:
        clients.send("last", -1)
        tier = "ingress" if house.streamers else "gateway"
        metrics = house.doors[-1].metrics()
        depth = metrics[f"headrace_{tier}_requests_waiting"]
        assert metrics[f'headrace_{tier}_model_requests_waiting{{model="tiny"}}'] == depth
        assert metrics[f'headrace_{tier}_class_requests_waiting{{class="batch"}}'] == 1
        assert metrics[f"headrace_{tier}_waiting_oldest_age_s"] > 0


def test_a_peek_finds_what_waits_and_says_why(house: Metered) -> None:
    with waiting(house) as clients:
        clients.send("last", -1)
        row = row_of(house, "last")
        with patient():
            found = asked(house.nats_url, "peek", row["oldest"])
        assert (found["state"], found["tenant"], found["model"], found["class"]) == (
            *("waiting_in_ingress", "last", "tiny"),
            "batch",
        )
        assert found["node"].startswith(house.doors[-1].name)
        assert found["age_s"] >= row["oldest_age_s"]
        assert found["ahead"] == 0  # in its lane
        assert (found["slots"], found["watermark"]) == (1, 1)
        assert found["queued"] >= found["watermark"]
        with patient():
            text = headrace(house.nats_url, "peek", row["oldest"]).stdout
        assert "the watermark of 1 live slots is 1" in text


def test_an_operators_cancel_ends_it_and_returns_what_was_reserved(house: Metered) -> None:
    def asks_again() -> str:
        with house.client("single", -1) as client:
            hurry = {"x-request-timeout": "3"}
            answer = client.post(CHAT, json=chat(model="tiny"), headers=hurry)
        return str(refusal(answer)["code"])

    with waiting(house) as clients:
        answer = clients.send("single", -1)
        assert asks_again() == "rate_limit_exceeded"
        request = row_of(house, "single")["oldest"]
        with patient():
            told = asked(house.nats_url, "cancel", request)
        assert told == {"id": request, "status": "cancelled"}
        assert is_cancelled(answer)
        wait_for(
            lambda: asks_again() != "rate_limit_exceeded", within_s=SOON_S, what="room for another"
        )
        with patient():
            again = headrace(house.nats_url, "cancel", request)
        assert (again.exit_code, again.stdout) == (1, "")
        assert "nor does it wait in ingress" in again.stderr
        assert house.ledger(request)["starts"] == 0


def test_its_tenant_cancels_it_at_any_other_node_and_nobody_else_does(house: Metered) -> None:
    with waiting(house) as clients:
        answer = clients.send("first", 0)
        request = row_of(house, "first")["oldest"]
        for url in {house.doors[-1].url, house.socket_end}:
            theirs = _cancel(url, "other", request)
            assert (theirs.status_code, refusal(theirs)["code"]) == (404, "not_found")
        assert not answer.done()
        for url in (house.socket_end, house.doors[-1].url, house.doors[-1].url):
            # A node that is busy may not have said in time that the request waits there.
            ours = _heard_cancel(url, "first", request)
            assert ours.json() == {"id": request, "status": "cancelled"}
        assert is_cancelled(answer)


def _cancel(url: str, tenant: str, request: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key_of(tenant)}"}
    return httpx.post(f"{url}/v1/requests/{request}/cancel", headers=headers, timeout=60)


def _heard_cancel(url: str, tenant: str, request: str) -> httpx.Response:
    answers: list[httpx.Response] = []

    def heard() -> bool:
        answers.append(_cancel(url, tenant, request))
        return answers[-1].status_code == 200

    wait_for(heard, within_s=5, what="a cancel that is heard")
    return answers[-1]


def test_a_purge_of_a_tenant_ends_what_waits_anywhere_and_leaves_the_others(
    house: Metered,
) -> None:
    with waiting(house) as clients:
        ours = [clients.send("first", door) for door in (0, -1, -1)]
        theirs = clients.send("other", 0)
        args = ("purge", "--tenant", "first")
        nodes = len(house.doors)
        there = {"nodes": nodes, "waiting": 3, "purged": 0}
        said = f"3 in ingress ({nodes} nodes answered) would be purged"
        wait_for(
            lambda: (
                asked(house.nats_url, *args, "--dry-run")["ingress"] == there
                and said in headrace(house.nats_url, *args, "--dry-run").stdout
            ),
            within_s=0.3,
            what=said,
        )
        with patient(5.0):
            told = asked(house.nats_url, *args, "--yes")
        assert told["ingress"] == there | {"purged": 3}
        assert (told["waiting"], told["running"], told["purged"]) == (0, 0, 0)
        assert all(is_cancelled(answer) for answer in ours)
        assert not theirs.done()


def test_a_revoked_key_that_ends_its_requests_ends_what_waits_too(house: Metered) -> None:
    made = headrace(house.nats_url, "keys", "create", "--tenant", "other")
    key = made.stdout.splitlines()[-1]
    listed = asked(house.nats_url, "keys", "list", "--tenant", "other")["keys"]
    newest = max(listed, key=lambda each: float(each["created_s"]))
    wait_for(
        lambda: _models(house, key) == 200,
        within_s=15,
        what="the news of the key",
    )
    with waiting(house) as clients:
        answer = clients.send("other", -1, key=key)
        stays = clients.send("other", -1)
        with patient(5.0):
            told = asked(house.nats_url, "keys", "revoke", newest["id"], "--end")
        assert told["requests_ended"] == 1
        assert is_cancelled(answer)
        assert not stays.done()


def _models(house: Metered, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{house.doors[-1].url}/v1/models", headers=headers, timeout=60).status_code


def test_what_waits_for_a_socket_is_cancelled_there(house: Metered) -> None:
    def rows() -> list[dict[str, Any]]:
        return [row for row in backlog(house)["ingress"]["rows"] if row["tenant"] == "first"]

    def cancel_it() -> None:
        wait_for(lambda: bool(rows()), within_s=15, what="its row")
        [row] = rows()
        with patient():
            assert headrace(house.nats_url, "cancel", row["oldest"]).exit_code == 0

    async def run() -> dict[str, Any] | None:
        headers = {"authorization": f"Bearer {key_of('first')}"}
        async with talking(house.socket_end, CHAT, additional_headers=headers) as talk:
            heard = await talk.begin("mine", chat(model="tiny"))
            await asyncio.to_thread(cancel_it)
            await talk.ended(heard)
        return heard.error

    with waiting(house):
        error = asyncio.run(run())
    assert error is not None
    assert error["code"] == "request_cancelled"


def test_a_frozen_ingress_is_missing_from_those_that_answered(house: Metered) -> None:
    last = house.doors[-1].process
    freeze(last.pid)
    try:
        backlog(house, nodes=len(house.doors) - 1)
    finally:
        os.kill(last.pid, signal.SIGCONT)
    backlog(house, nodes=len(house.doors))


def test_with_every_process_stopped_the_brokers_part_is_right_and_the_rest_unknown(
    mode: Mode, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stopped")
    models = {"tiny": '{"max_num_seqs": 1}'}
    with (
        ExitStack() as stack,
        metered(mode, folder, tenants={"free": ""}, models=models, doors=2) as house,
    ):
        body = chat("waits", model="tiny", sim=LONG)
        turns = itertools.cycle(range(len(house.doors)))

        def one_waits() -> bool:
            """Send one more: those that come before a door has counted are let in."""
            stack.callback(house.sent("free", body, next(turns)).close)
            return house.waiting() > 0

        wait_for(one_waits, within_s=15, what="a full room")
        wait_for(lambda: backlog(house)["total"]["running"] > 0, within_s=15, what="a full slot")
        for each in (*house.front, *house.workers.values()):
            each.process.terminate()
            each.process.kill()
        shown = backlog(house, nodes=0)
        assert shown["total"]["waiting"] + shown["total"]["running"] == queued(house) > 1
        assert (shown["ingress"]["nodes"], shown["ingress"]["total"]) == (0, None)
        assert "no ingress node answered" in headrace(house.nats_url, "backlog").stdout
        for act in ("peek", "cancel"):
            unknown = headrace(house.nats_url, act, new_request_id())
            assert (unknown.exit_code, unknown.stdout) == (1, "")
            assert "no ingress node answered whether it waits there" in unknown.stderr
        wait_for(lambda: not backlog(house, nodes=0)["models"], within_s=15, what="no live worker")
