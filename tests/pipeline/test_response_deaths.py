"""A response whose worker dies in the middle goes on elsewhere, event by event."""

from pathlib import Path
from typing import Any

import pytest

from streamer.sse import COMMENT
from tests.pipeline.conftest import Node, System, worker
from tests.servers import wait_ready
from tests.sse import Event, Reader
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

PIECES = [f"{number} " for number in range(80)]


def mortal(system: System, folder: Path, name: str) -> Node:
    """Start a worker of a model of its own."""
    return worker(name, system.nats_url, folder, "--served-model-name", "mortal")


def test_a_response_whose_worker_dies_goes_on_and_is_replayed_as_it_was(
    system: System, tmp_path: Path
) -> None:
    victim = mortal(system, tmp_path, "victim")
    wait_ready(victim.process, victim.admin_url)
    wait_for(lambda: system.knows("mortal"), within_s=15, what="the model")
    body: dict[str, Any] = {
        "model": "mortal",
        "input": "Count.",
        "stream": True,
        "sim": {"pieces": PIECES, "itl_ms": 200, "ttft_ms": 0},
    }
    heirs: list[Node] = []
    try:
        with system.client() as client, client.stream("POST", "/v1/responses", json=body) as answer:
            reader, events, raw = Reader(), list[Event](), b""
            for part in answer.iter_raw():
                raw += part
                events += reader.feed(part)
                if len(events) > 12 and not heirs:
                    victim.process.kill()
                    heirs.append(mortal(system, tmp_path, "heir"))
        numbers = [event.json["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))
        deltas = [e.json["delta"] for e in events if e.name == "response.output_text.delta"]
        assert deltas == PIECES
        assert events[-1].name == "response.completed"
        finished = "headrace_worker_requests_finished_total"
        wait_for(lambda: heirs[0].metrics()[finished] == 1, within_s=15, what="the heir's end")
        name = events[0].json["response"]["id"]
        with system.client() as client:
            again = client.get(f"/v1/responses/{name}", params={"stream": "true"})
            whole = client.get(f"/v1/responses/{name}")
        assert again.content == raw.replace(COMMENT, b"")  # in which it waited for its heir
        assert whole.json() == events[-1].json["response"]
    finally:
        victim.process.stop()
        for heir in heirs:
            heir.process.stop()
