"""A reader of 100 bytes a second among 100 fast ones takes bounded memory, delays nobody, and gets
everything in the end."""

import asyncio
import json
import socket

import pytest

from tests.memory import own_bytes
from tests.pipeline.asking import CHAT, PATIENCE_S, chat, hook, stream_raw
from tests.pipeline.conftest import System
from tests.sse import events_of
from tests.waiting import until, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("mode", ["gateway"], indirect=True, scope="session"),
]

FAST = 100
TOKENS = 120
LONG_TOKENS = 20_000  # about 5 MB of events: more than the buffers of two kernels take
GROWTH_BYTES_MAX = 8 * 1024 * 1024


class SlowReader:
    """A client that takes 100 bytes a second, and lets little wait in its own machine."""

    def __init__(self, url: str, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        self._socket.setblocking(False)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        self._raw = b""

    async def trickle(self) -> None:
        """Read ten bytes every tenth of a second, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            self._raw += await loop.sock_recv(self._socket, 10)
            await asyncio.sleep(0.1)

    async def rest(self) -> bytes:
        """Read to the end as fast as it comes, and return the whole body."""
        loop = asyncio.get_running_loop()
        while part := await loop.sock_recv(self._socket, 1 << 20):
            self._raw += part
        self._socket.close()
        _, _, rest = self._raw.partition(b"\r\n\r\n")
        parts = []
        while rest:  # chunks: RFC 9112, section 7.1
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        return b"".join(parts)


def test_one_reader_of_100_bytes_a_second_costs_the_others_nothing_and_gets_everything(
    system: System,
) -> None:
    long = chat(
        "a long tale",
        stream=True,
        max_tokens=LONG_TOKENS,
        ignore_eos=True,
        sim={"itl_ms": 0.1, "ttft_ms": 0},
    )
    pieces = [f"<{k}>" for k in range(TOKENS)]

    async def fast(number: int) -> None:
        body = chat(f"fast {number}", sim=hook(*pieces, itl_ms=20, ttft_ms=0))
        events = events_of(await stream_raw(system.url, body))
        assert [event.id for event in events] == [str(k) for k in range(TOKENS + 1)] + [None]

    async def crowd() -> None:
        # Who waited for the slow one would wait for hours.
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(fast(number) for number in range(FAST)))

    async def run() -> bytes:
        await crowd()
        before = own_bytes(system.doors[0].process.pid)
        slow = SlowReader(system.doors[0].url, long)
        trickling = asyncio.create_task(slow.trickle())
        await crowd()
        await asyncio.to_thread(_wait_made, system)
        # What is on its way is not what is kept.
        await until(
            lambda: own_bytes(system.doors[0].process.pid) - before < GROWTH_BYTES_MAX, within_s=5
        )
        trickling.cancel()
        return await slow.rest()

    events = events_of(asyncio.run(run()))
    ids = [int(event.id) for event in events if event.id is not None]
    assert ids == list(range(LONG_TOKENS + 1))
    assert events[-1].data == "[DONE]"
    system.wait_at_rest()


def _wait_made(system: System) -> None:
    wait_for(lambda: system.queued() == 0, within_s=60, what="the whole tale made")
