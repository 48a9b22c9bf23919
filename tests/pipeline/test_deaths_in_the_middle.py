"""A worker killed between the halves of a character or of a stop string: nobody can tell."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.asking import CHAT, COMPLETIONS, chat, hook, stream_raw
from tests.pipeline.conftest import Node, System, page, worker
from tests.servers import wait_ready
from tests.sse import events_of
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow

EMOJI: tuple[Any, ...] = ("hi ", {"hex": "f09f"}, {"hex": "98"}, {"hex": "80"}, "!", " end")
STOP = ("one ", "tw", "o <E", "N", "D> three", " four")
MISS = ("one ", "tw", "o <E", "N", "T> three", " four")
KILLED = {
    "after half a character": (CHAT, EMOJI, 2, 6, "hi 😀! end"),
    "before the last byte": (COMPLETIONS, EMOJI, 3, 6, "hi 😀! end"),
    "after half a stop string": (CHAT, STOP, 3, 5, "one two "),
    "before its last piece": (COMPLETIONS, STOP, 4, 5, "one two "),
    "after half of a near miss": (CHAT, MISS, 3, 6, "one two <ENT> three four"),
}
"""For each: after how many tokens of how many the worker is killed."""
TRIES = 5
"""A machine that stalls may bring the next token before the death."""


@contextmanager
def pair(system: System, folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two workers of a model of their own, for a block."""
    served = ("--served-model-name", "pair")
    with ExitStack() as cleanup:
        found = []
        for number in range(2):
            node = worker(f"pair-{number}", system.nats_url, folder, *served)
            cleanup.callback(node.process.kill)
            found.append(node)
        for node in found:
            wait_ready(node.process, node.admin_url)
        wait_for(lambda: system.knows("pair"), within_s=15, what="the model")
        yield found[0], found[1]


def _made(node: Node) -> int:
    """Return how many tokens a worker has made for its only request."""
    entries = json.loads(page(f"{node.admin_url}/sim/requests")).values()
    return sum(entry["tokens"] for entry in entries)


async def _holder(workers: tuple[Node, Node], tokens: int) -> Node:
    """Return the worker that has made so many tokens, once it has."""

    def holder() -> Node | None:
        return next((node for node in workers if _made(node) >= tokens), None)

    found = await until(lambda: asyncio.to_thread(holder))
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KILLED)
def test_a_worker_killed_in_the_middle_of_it_leaves_no_trace_in_the_text(
    system: System, tmp_path: Path, kind: str
) -> None:
    path, pieces, tokens, made, text = KILLED[kind]
    body = chat(stop=["<END>"], sim=hook(*pieces, ttft_ms=0, itl_ms=500)) | {"model": "pair"}
    if path == COMPLETIONS:
        del body["messages"]
        body |= {"prompt": "x", "max_tokens": 50}

    def killed_in_time() -> bool:
        """Kill a worker after so many tokens; tell whether it had not made more by then."""
        with pair(system, tmp_path) as workers:

            async def run() -> tuple[bytes, Node]:
                asked = asyncio.create_task(stream_raw(system.url, body, path))
                holder = await _holder(workers, tokens)
                os.kill(holder.process.pid, signal.SIGKILL)
                return await asked, holder

            raw, holder = asyncio.run(run())
            [other] = [node for node in workers if node is not holder]
            _assert_whole(raw, text)
            system.wait_at_rest(within_s=10)  # nobody serves the model when the pair is gone
            return _made(other) >= made - tokens

    assert any(killed_in_time() for _ in range(TRIES))


def _assert_whole(raw: bytes, text: str) -> None:
    events = events_of(raw)
    assert events[-1].data == "[DONE]"
    choices = [event.json["choices"][0] for event in events[:-1]]
    said = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    assert said == text
    assert "\ufffd".encode() not in raw
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
