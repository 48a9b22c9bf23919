"""A thousand sockets with a stream each, or one with a hundred: exact to the token, and small.

Each is measured in a gateway of its own: a process that was busy before has memory to use again.
"""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.memory import own_bytes
from tests.pipeline.asking import CHAT, chat, hook
from tests.pipeline.conftest import Node, System, front, models_at
from tests.servers import wait_ready
from tests.talk import Talk, talking
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

STREAM_BYTES_MAX = 32 * 1024
WARM = 20
TOKENS = 25
AT_ONCE = 50
"""Handshakes in flight: a listener's backlog is bounded."""
FILES = 4096


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for the client's ends of the sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(FILES, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _pieces(number: int) -> list[str]:
    return [f"{number}.{k} " for k in range(TOKENS)]


@pytest.fixture
def gateway(system: System, tmp_path: Path) -> Iterator[Node]:
    """A gateway that has done nothing yet."""
    found = front("gateway", system.nats_url, tmp_path, name="fresh")
    try:
        wait_ready(found.process, found.admin_url)
        wait_for(lambda: "sim" in models_at(found.url), within_s=15, what="the model")
        yield found
    finally:
        found.process.stop()


async def _opened(gateway: Node, stack: AsyncExitStack, count: int) -> list[Talk]:
    """Open some sockets, a few at a time, and close them with the stack."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one() -> Talk:
        async with room:
            return await stack.enter_async_context(talking(gateway.url, CHAT))

    return await asyncio.gather(*(one() for _ in range(count)))


async def _held(talks: list[Talk], streams: int) -> None:
    """Begin streams in turns on some sockets that show one token and then stay open."""
    held: dict[str, Any] = chat("held", sim=hook("a", "b", ttft_ms=0, itl_ms=600_000))
    for number in range(streams):
        talk = talks[number % len(talks)]
        heard = await talk.begin(f"held {number}", held)
        await talk.chunks_came(heard, 1)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize(("sockets", "streams"), [(1000, 1000), (1, 100)])
def test_every_token_of_a_crowd_is_exact_and_an_open_stream_small(
    system: System, gateway: Node, sockets: int, streams: int
) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            warm = await _opened(gateway, stack, WARM)
            await _held(warm, WARM)
            before = own_bytes(gateway.process.pid)
            talks = await _opened(gateway, stack, sockets)
            await _held(talks, streams)
            each_bytes = (own_bytes(gateway.process.pid) - before) / streams
            print(f"{each_bytes / 1024:.1f} KiB per open stream")
            assert each_bytes <= STREAM_BYTES_MAX
            for number in range(streams):
                await talks[number % sockets].cancel(f"held {number}")
            begun = [
                (
                    talks[number % sockets],
                    await talks[number % sockets].begin(
                        f"{number}", chat("x", sim=hook(*_pieces(number), itl_ms=20, ttft_ms=0))
                    ),
                )
                for number in range(streams)
            ]
            for number, (talk, heard) in enumerate(begun):
                await talk.ended(heard)
                assert heard.error is None
                said = [
                    choice["delta"]["content"]
                    for chunk in heard.chunks
                    for choice in chunk["choices"]
                    if choice["delta"].get("content")
                ]
                assert said == _pieces(number)
            for number in range(streams):
                talk = talks[number % sockets]
                heard = talk.heard(f"held {number}")
                await talk.ended(heard)
                error = heard.error
                assert error is not None
                assert error["code"] == "request_cancelled"

    asyncio.run(run())
    system.wait_at_rest(within_s=15)
