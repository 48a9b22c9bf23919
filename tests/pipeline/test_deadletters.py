"""A request that kills its worker each time: one error, a dead letter, and a second chance."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.bus import Bus
from headrace.kept import kept
from schemas import subjects
from schemas.deadletter import DeadLetter, encode_letter
from schemas.wire import Sampling, Shape, encode_envelope
from tests.broker import with_bus
from tests.pipeline.asking import CHAT, chat, collect, hook
from tests.pipeline.conftest import Node, System, worker
from tests.queue import asked, envelope, place
from tests.servers import START_S_MAX, answers
from tests.sse import events_of
from tests.waiting import until, wait_for


def read_stream(system: System, request: str) -> list[Any]:
    """Read a request's whole stream, as a client that knows its id."""
    with system.client() as client:
        answer = client.get(f"{system.socket_end.url}/v1/streams/{request}")
    assert answer.status_code == 200, answer.text
    return events_of(answer.content)


def test_a_requeued_letter_runs_and_its_stream_is_read_by_its_new_id(system: System) -> None:
    subject = place(tenant="default", model="sim", partition=3)
    request = msgspec.structs.replace(
        envelope(subject),
        sampling=Sampling(max_tokens=5),
        shape=Shape("chat", "sim", 5, True, 1, False),
        deadline_s=0.0,  # long past: its new one counts
    )
    letter = DeadLetter(
        request=subject.request,
        tenant="default",
        model="sim",
        reason="3 workers died while they ran it",
        died_s=0.0,
        tokens=0,
        envelope=encode_envelope(request),
        place=str(subject),
    )
    name = subjects.deadletters_of(model="sim", tenant="default")
    with_bus(system.nats_url, lambda bus: bus.store(name, encode_letter(letter)))
    [row] = asked(system.nats_url, "deadletters", "requeue", subject.request)["rows"]
    events = read_stream(system, row["request"])
    assert events[-1].data == "[DONE]"
    assert events[-2].json["usage"]["completion_tokens"] == 5
    assert system.ledger(row["request"])["starts"] == 1
    assert read_stream(system, row["request"]) == events, "kept for who comes later"
    letters = asked(system.nats_url, "deadletters", "list")["rows"]
    assert subject.request not in [letter["id"] for letter in letters]

    async def answer_is_kept(bus: Bus) -> None:
        await until(lambda: kept(bus, tenant="default", request=row["request"]))

    with_bus(system.nats_url, answer_is_kept)
    system.wait_at_rest()


class Crew:
    """A worker of a model of its own, which is started anew each time it has died."""

    def __init__(self, system: System, folder: Path, model: str) -> None:
        self._system = system
        self._folder = folder
        self._model = model
        self.born: list[Node] = []

    def hire(self) -> Node:
        """Start a worker and wait until it is ready, or has been, and died of what it was given."""
        name = f"{self._model}-{len(self.born)}"
        args = ("--served-model-name", self._model)
        found = worker(name, self._system.nats_url, self._folder, *args)
        self.born.append(found)
        wait_for(
            lambda: not found.process.alive or answers(f"{found.admin_url}/readyz"),
            within_s=START_S_MAX,
            what=lambda: f"{name}\n{found.process.said()[-2000:]}",
        )
        return found

    def lose(self) -> None:
        """Wait until the latest worker has died, and start the next."""
        process = self.born[-1].process
        wait_for(lambda: not process.alive, within_s=60, what="the death")
        self.hire()


@contextmanager
def crew(system: System, folder: Path, model: str) -> Iterator[Crew]:
    found = Crew(system, folder, model)
    try:
        found.hire()
        wait_for(lambda: system.knows(model), within_s=30, what=model)
        yield found
    finally:
        for each in found.born:
            each.process.stop()


@pytest.mark.slow
def test_three_deaths_make_one_error_and_a_letter_and_a_requeue_begins_anew(
    system: System, tmp_path: Path
) -> None:
    model = f"deadly-{system.mode}"
    deadly = chat("the deadly one", model=model, stream=True, sim=hook("a", "b", "c", exit_at=2))
    answers: list[httpx.Response] = []

    def ask() -> None:
        with system.client() as client:
            answers.append(client.post(CHAT, json=deadly, timeout=120))

    with crew(system, tmp_path, model) as workers:
        asking = threading.Thread(target=ask)
        asking.start()
        for _ in range(3):
            workers.lose()
        asking.join(timeout=120)
        [answer] = answers
        events = events_of(answer.content)
        assert [event.json["error"]["code"] for event in events if "error" in event.json] == [
            "worker_lost"
        ]
        assert "error" in events[-1].json, "it is the last"
        request = answer.headers["x-request-id"]
        found = asked(system.nats_url, "deadletters", "show", request)
        assert found["reason"] == "3 workers died while they ran it"
        assert [attempt["worker"].startswith(model) for attempt in found["attempts"]] == [True] * 3
        assert [attempt["ended"] for attempt in found["attempts"]] == ["died"] * 3
        assert "the deadly one" not in json.dumps(found)
        with system.client() as client:
            said = collect(client, chat(model=model, sim=hook("alive")))
            assert said["choices"][0]["message"]["content"] == "alive", "the others go on"
        [row] = asked(system.nats_url, "deadletters", "requeue", request)["rows"]
        for _ in range(3):  # it begins anew, so it takes three more
            workers.lose()
        assert "error" in read_stream(system, row["request"])[-1].json
        letters = asked(system.nats_url, "deadletters", "list", "--model", model)["rows"]
        assert [letter["id"] for letter in letters] == [row["request"]]
        assert asked(system.nats_url, "deadletters", "drop", row["request"]) == {"dropped": 1}
    system.wait_at_rest(within_s=system.leaves_within_s)
