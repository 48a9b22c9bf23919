"""Many streams over WebSockets: every token exact, nobody waits for another, memory bounded."""

import asyncio
import itertools
import json
import multiprocessing
import socket
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.memory import own_bytes
from tests.pipeline.asking import CHAT, PATIENCE_S, chat, hook
from tests.pipeline.conftest import System
from tests.talk import Heard, talking
from tests.waiting import until

pytestmark = pytest.mark.slow

STREAMS = 100
SLOW = 17
AHEAD_MAX = 200
"""By how many tokens of 40 ms a crowd may be ahead of the first of one that came later."""
HELD = 32
HELD_BYTES_MAX = 12 * 1024 * 1024
"""Kept whole, what is held would take 27 MB."""
OPEN = 500
STREAM_BYTES_MAX = 32 * 1024
PING_S_MAX = 1.0
TRIES = 3
"""What a prompt does to the others it does each time; a busy machine's stalls are not of it."""


def _memory(system: System) -> int:
    return own_bytes(system.socket_end.process.pid)


def _bodies() -> list[dict[str, Any]]:
    """Return requests of mixed lengths; one of them does not end for half an hour."""
    bodies = [
        chat(f"Stream {number}.", seed=number, max_tokens=5 + 7 * number % 200, ignore_eos=True)
        for number in range(STREAMS)
    ]
    bodies[SLOW] = chat("Slow.", sim=hook(*"slow", itl_ms=600_000, ttft_ms=0))
    return bodies


async def _whole(system: System, bodies: list[dict[str, Any]]) -> list[str]:
    limits = httpx.Limits(max_connections=20)
    async with httpx.AsyncClient(
        base_url=system.url, timeout=PATIENCE_S, limits=limits, follow_redirects=True
    ) as client:
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
    return [answer.json()["choices"][0]["message"]["content"] for answer in answers]


@pytest.mark.parametrize("sockets", [1, STREAMS])
def test_100_streams_are_exact_and_do_not_wait_for_the_slow_one(
    system: System, sockets: int
) -> None:
    async def run() -> None:
        bodies = _bodies()
        texts = await _whole(system, [body for n, body in enumerate(bodies) if n != SLOW])
        async with AsyncExitStack() as stack:
            talks = [
                await stack.enter_async_context(talking(system.socket_end.url, CHAT))
                for _ in range(sockets)
            ]
            turns = itertools.cycle(talks)
            begun = [(next(turns), f"{n}", body) for n, body in enumerate(bodies)]
            all_heard = [await talk.begin(name, body) for talk, name, body in begun]
            others = [each for number, each in enumerate(all_heard) if number != SLOW]
            for number, (talk, name, _) in enumerate(begun):
                if number != SLOW:
                    await talk.ended(talk.heard(name))
            slow_talk, slow_name, _ = begun[SLOW]
            slow = all_heard[SLOW]
            await slow_talk.chunks_came(slow, 1)
            assert "slow".startswith(slow.text())
            assert not slow.ended.is_set()
            await slow_talk.cancel(slow_name)
            await slow_talk.ended(slow)
        assert [heard.text() for heard in others] == texts
        assert all(heard.done for heard in others)

    asyncio.run(run())
    system.wait_at_rest()


def test_a_fast_request_in_a_crowd_waits_for_none_of_it(system: System) -> None:
    """How long it takes is told by how far the crowd came meanwhile: its tokens come as often."""
    pace = {"itl_ms": 40, "ttft_ms": 0}
    fast = chat("fast", sim=hook(*"abcdefghij", **pace))
    crowd = chat("crowd", sim=hook(*(f"{k} " for k in range(2000)), **pace))

    async def run() -> None:
        async with talking(system.socket_end.url, CHAT) as talk:
            others = [await talk.begin(f"{n}", crowd) for n in range(STREAMS)]
            for heard in others:
                await talk.chunks_came(heard, 1)
            asked = _counts(others)
            heard = await talk.begin("fast", fast)
            await talk.chunks_came(heard, 1)
            begun = _counts(others)
            await talk.ended(heard)
            ended = _counts(others)
            assert heard.text() == "abcdefghij"
            assert not any(other.ended.is_set() for other in others)
            assert _came(begun, ended) <= 3 * len(heard.chunks), "others went before it"
            assert _came(asked, begun) <= AHEAD_MAX, "it was begun late"
            for number in range(STREAMS):
                await talk.cancel(f"{number}")
            await talk.ended(*others)

    asyncio.run(run())
    system.wait_at_rest()


def _counts(all_heard: list[Heard]) -> list[int]:
    return [len(heard.chunks) for heard in all_heard]


def _came(before: list[int], after: list[int]) -> float:
    """Return how many tokens came at least of each of the crowd, but for its slowest tenth: who is
    at the fast one's worker stands still with it."""
    tenths = statistics.quantiles((b - a for a, b in zip(before, after, strict=True)), n=10)
    return tenths[0]


def test_one_slow_reader_takes_bounded_memory_and_nothing_from_the_others(system: System) -> None:
    pieces = [f"{k:05} " * 1000 for k in range(140)]  # 840 kB, more than the buffers together hold
    large = chat("large", sim=hook(*pieces, itl_ms=40, ttft_ms=0))
    paced = chat("paced", sim=hook(*(f"{k} " for k in range(60)), itl_ms=20, ttft_ms=0))

    async def run() -> None:
        with socket.create_connection(
            ("127.0.0.1", int(system.socket_end.url.rpartition(":")[2]))
        ) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)
            async with (
                talking(system.socket_end.url, CHAT, sock=sock, ping_interval=None) as slow,
                talking(system.socket_end.url, CHAT) as fast,
            ):
                warm = [await fast.begin(f"warm {n}", large) for n in range(HELD)]
                await fast.ended(*warm)
                before = _memory(system)
                slow.socket.transport.pause_reading()
                held = [await slow.begin(f"{n}", large) for n in range(HELD)]
                others = [await fast.begin(f"{n}", paced) for n in range(30)]
                # Who waited for the slow one would wait until it reads, or is cut after a minute.
                await fast.ended(*others)
                assert all(heard.done for heard in others)
                assert not any(heard.ended.is_set() for heard in held)
                # What is on its way is not what is kept: all has been made by then.
                await until(lambda: asyncio.to_thread(lambda: system.queued() == 0))
                await until(lambda: _memory(system) - before < HELD_BYTES_MAX)
                slow.socket.transport.resume_reading()
                await slow.ended(*held)
                assert {heard.text() for heard in held} == {"".join(pieces)}

    asyncio.run(run())
    system.wait_at_rest()


def test_an_open_stream_takes_at_most_32_kib(system: System) -> None:
    held = chat("held", sim=hook("a", "b", ttft_ms=0, itl_ms=600_000))

    async def run() -> int:
        async with AsyncExitStack() as stack:

            async def opened(count: int) -> None:
                for _ in range(count):
                    talk = await stack.enter_async_context(talking(system.socket_end.url, CHAT))
                    await talk.chunks_came(await talk.begin("a", held), 1)

            await opened(20)
            before = _memory(system)
            await opened(OPEN)
            return _memory(system) - before

    assert asyncio.run(run()) / OPEN <= STREAM_BYTES_MAX
    system.wait_at_rest(within_s=10)


def _pings(url: str, stop: Any, answer: Any) -> None:
    """Note when each ping was sent and its pong came, in a process of its own."""
    times_s = []
    with connect(url, compression=None, proxy=None) as client:
        answer.put(None)
        while not stop.is_set():
            begun_s = time.monotonic()
            client.ping().wait(60)
            times_s.append((begun_s, time.monotonic()))
            time.sleep(0.005)
    answer.put(times_s)


@pytest.mark.parametrize("kind", ["words", "one word", "token ids", "messages"])
def test_a_prompt_of_5_mb_delays_nobodys_pong(system: System, kind: str) -> None:
    size = 5 * 1024 * 1024
    bodies: dict[str, dict[str, Any]] = {
        "words": chat("the river carries water " * (size // 24)),
        "one word": chat("x" * size),
        "token ids": {"model": "sim", "prompt": [300] * (size // 5)},
        "messages": {"model": "sim", "messages": chat()["messages"] * (size // 60)},
    }
    path = "/v1/completions" if kind == "token ids" else CHAT
    text = json.dumps({"id": "a", "body": bodies[kind]})

    async def run() -> None:
        async with talking(system.socket_end.url, path) as talk:
            await talk.say(text)
            await talk.ended(talk.heard("a"))
            error = talk.heard("a").error
            assert error is not None
            assert error["code"] == "context_length_exceeded"

    spawn = multiprocessing.get_context("spawn")
    stop, answer = spawn.Event(), spawn.Queue()
    url = system.socket_end.url.replace("http", "ws", 1) + CHAT
    pinging = spawn.Process(target=_pings, args=(url, stop, answer))
    pinging.start()
    try:
        answer.get(timeout=60)  # it has connected
        spans = []
        for _ in range(TRIES):
            begun_s = time.monotonic()
            asyncio.run(run())
            spans.append((begun_s, time.monotonic()))
        stop.set()
        pongs = answer.get(timeout=60)
        longest_s = [
            max(
                (end_s - since_s for since_s, end_s in pongs if end_s > a_s and since_s < b_s),
                default=PING_S_MAX,  # who pings stood still
            )
            for a_s, b_s in spans
        ]
        assert min(longest_s) < PING_S_MAX, longest_s
    finally:
        stop.set()
        pinging.join(10)
