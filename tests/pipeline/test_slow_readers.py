"""Readers of 100 bytes a second among 100 fast ones take bounded memory, delay nobody, and get
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
SLOW = 8
TOKENS = 120
LONG_TOKENS = 30_000  # about 7 MB of events, of which the kernel may take 3
GROWTH_BYTES_MAX = 8 * 1024 * 1024
"""Some times what the bounded buffers of all slow readers take, and a fourth of what the kernel
leaves of their answers."""


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
        at = 0
        while at < len(rest):  # chunks: RFC 9112, section 7.1
            begin = rest.index(b"\r\n", at) + 2
            end = begin + int(rest[at : begin - 2], 16)
            parts.append(rest[begin:end])
            at = end + 2
        return b"".join(parts)


def test_readers_of_100_bytes_a_second_cost_the_others_nothing_and_get_everything(
    system: System,
) -> None:
    pieces = [f"<{k}>" for k in range(TOKENS)]

    def long(number: int) -> dict[str, object]:
        sim = {"itl_ms": 0.1, "ttft_ms": 0}
        tale = chat(f"a long tale, {number}", max_tokens=LONG_TOKENS, ignore_eos=True, sim=sim)
        return tale | {"stream": True}

    async def fast(number: int) -> None:
        body = chat(f"fast {number}", sim=hook(*pieces, itl_ms=20, ttft_ms=0))
        events = events_of(await stream_raw(system.url, body))
        assert [event.id for event in events] == [str(k) for k in range(TOKENS + 1)] + [None]

    async def crowd() -> None:
        # Who waited for the slow ones would wait for hours.
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(fast(number) for number in range(FAST)))

    async def run() -> list[bytes]:
        await crowd()
        gateway = system.doors[0]
        before = own_bytes(gateway.process.pid)
        slow = [SlowReader(gateway.url, long(number)) for number in range(SLOW)]
        trickling = [asyncio.create_task(each.trickle()) for each in slow]
        await crowd()
        await asyncio.to_thread(_wait_made, system)
        # What is on its way is not what is kept.
        await until(lambda: own_bytes(gateway.process.pid) - before < GROWTH_BYTES_MAX, within_s=5)
        for task in trickling:
            task.cancel()
        return await asyncio.gather(*(each.rest() for each in slow))

    for raw in asyncio.run(run()):
        events = events_of(raw)
        ids = [int(event.id) for event in events if event.id is not None]
        assert ids == list(range(LONG_TOKENS + 1))
        assert events[-1].data == "[DONE]"
    system.wait_at_rest()


def _wait_made(system: System) -> None:
    wait_for(lambda: system.queued() == 0, within_s=60, what="all tales made")
