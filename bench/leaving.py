"""`python -m bench.leaving`: how soon an engine is told to stop when its client leaves or cancels.

Rule: nothing is measured that comes before the abort. A worker writes a request's terminal frame
once the engine has given it up; it is heard here, by the clock that its client left by. So each
figure holds a settlement, an acknowledged write and a message more than the abort took.
"""

import asyncio
import json
import random
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer
import uvloop
from websockets.asyncio.client import connect

from bench import report, system
from bench.load import LoadFailed, chat
from bench.plan import percentile
from bench.rows import INSTANT, Line
from bench.system import NotStarted, System
from headrace.bus import BusSettings, Message, connection
from schemas.wire import Failed, Frame, Tokens, decode_frame

CHAT: Final = "/v1/chat/completions"
HOST: Final = "127.0.0.1"
BUDGET_MS: Final = 1000.0
PAUSE_S_MAX: Final = 0.3
"""Longer than what looks after replies by a clock takes from look to look."""
PATIENCE_S: Final = 30.0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Heard:
    """What workers say of all requests, and when it was heard. One request is asked at a time."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._frames: asyncio.Queue[tuple[float, str, Frame]] = asyncio.Queue()

    def take(self, message: Message) -> None:
        """Note a frame."""
        heard_s = time.monotonic()
        request = message.subject.rpartition(".")[2]
        self._frames.put_nowait((heard_s, request, decode_frame(message.data)))

    async def begun(self) -> str:
        """Wait for the first token of a request; return its id."""
        while True:
            _, request, frame = await self._next()
            if isinstance(frame, Tokens):
                self.requests.append(request)
                return request

    async def aborted_s(self, request: str) -> float:
        """Wait for a request's cancellation; return when it was heard. Raises LoadFailed."""
        while True:
            heard_s, about, frame = await self._next()
            if about == request and isinstance(frame, Failed):
                if frame.code != "request_cancelled":
                    raise LoadFailed(f"{request} ended in {frame.code}: {frame.message}")
                return heard_s

    async def _next(self) -> tuple[float, str, Frame]:
        async with asyncio.timeout(PATIENCE_S):
            return await self._frames.get()


def _head(method: str, path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _body(*, stream: bool) -> dict[str, object]:
    """Return a request that makes a token, and then none for long."""
    sim = {"ttft_ms": 0, "itl_ms": 600_000}
    return chat("Tell me about rivers.", tokens=10, stream=stream, sim=sim)


async def _asked(running: System, *headers: str, stream: bool = True) -> Connection:
    """Send a request, and follow where its answer is elsewhere."""
    reader, writer = await asyncio.open_connection(HOST, running.port)
    writer.write(_head("POST", CHAT, json.dumps(_body(stream=stream)).encode(), *headers))
    if running.socket_port == running.port:
        return reader, writer
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    lines = head.decode().split("\r\n")
    [location] = [x.partition(": ")[2] for x in lines if x.lower().startswith("location: ")]
    url = urlsplit(location)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(_head("GET", f"{url.path}?{url.query}", b""))
    return reader, writer


async def _shown(connected: Connection) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await connected[0].readuntil(b"data: ")


async def _pause(dice: random.Random) -> None:
    await asyncio.sleep(dice.uniform(0.0, PAUSE_S_MAX))


Try = Callable[[System, Heard, random.Random], Awaitable[float]]
"""Returns the seconds from leaving to the abort."""


async def _sse(running: System, heard: Heard, dice: random.Random, *headers: str) -> float:
    connected = await _asked(running, *headers)
    request = await heard.begun()
    await _shown(connected)
    await _pause(dice)
    left_s = time.monotonic()
    connected[1].close()
    return await heard.aborted_s(request) - left_s


async def _sse_with_key(running: System, heard: Heard, dice: random.Random) -> float:
    return await _sse(running, heard, dice, f"Idempotency-Key: {dice.random()}")


async def _unstreamed(running: System, heard: Heard, dice: random.Random) -> float:
    _, writer = await _asked(running, stream=False)
    request = await heard.begun()
    await _pause(dice)
    left_s = time.monotonic()
    writer.close()
    return await heard.aborted_s(request) - left_s


async def _socket(running: System, heard: Heard, dice: random.Random) -> float:
    url = f"ws://{HOST}:{running.socket_port}{CHAT}"
    socket = await connect(url, compression=None, proxy=None)
    await socket.send(json.dumps({"id": "a", "body": _body(stream=True)}))
    request = await heard.begun()
    await socket.recv()
    await _pause(dice)
    left_s = time.monotonic()
    await socket.close()
    return await heard.aborted_s(request) - left_s


async def _cancel(running: System, heard: Heard, dice: random.Random) -> float:
    connected = await _asked(running)
    request = await heard.begun()
    await _shown(connected)
    _, writer = await asyncio.open_connection(HOST, running.port)
    await _pause(dice)
    left_s = time.monotonic()
    writer.write(_head("POST", f"/v1/requests/{request}/cancel", b""))
    aborted_s = await heard.aborted_s(request)
    writer.close()
    connected[1].close()
    return aborted_s - left_s


TRIES: Final[dict[str, Try]] = {
    "an SSE connection closed": _sse,
    "the same with an Idempotency-Key": _sse_with_key,
    "an unstreamed one closed": _unstreamed,
    "a WebSocket closed": _socket,
    "a cancel over HTTP": _cancel,
}


async def _measure(running: System, tries: int) -> dict[str, list[float]]:
    heard, dice = Heard(), random.Random(7)
    found: dict[str, list[float]] = {}
    async with connection(BusSettings(running.nats_url), name="bench", timeout_s=10) as bus:
        await bus.listen("replies.>", heard.take)
        for what, one in TRIES.items():
            await one(running, heard, dice)  # warm
            found[what] = [await one(running, heard, dice) for _ in range(tries)]
    _check(running, heard.requests)
    return found


def _check(running: System, requests: list[str]) -> None:
    """Look into the engine's own ledger. Raises LoadFailed."""
    url = f"http://{HOST}:{running.worker_admin_port}/sim/requests"
    with urllib.request.urlopen(url, timeout=10) as answer:
        ledger = json.load(answer)
    for request in requests:
        if (ledger[request]["starts"], ledger[request]["aborts"]) != (1, 1):
            raise LoadFailed(f"{request} was not aborted once: {ledger[request]}")


def _lines(tries: int, *, split: bool) -> Iterator[Line]:
    row = "split" if split else "gateway"
    with system.running(sim=INSTANT, split=split) as running:
        found = uvloop.run(_measure(running, tries))
    for what, times_s in found.items():
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            measured = 1e3 * percentile(times_s, share)
            yield Line(row, f"{what}, {name}", "ms", measured, None, BUDGET_MS, f"of {tries}")


def main(
    tries: Annotated[int, typer.Option(help="How often each is tried.")] = 30,
) -> None:
    """Measure from a client's leaving to its engine's abort, in both forms of the system."""
    lines: list[Line] = []
    print(report.heading(), flush=True)
    try:
        for split in (False, True):
            for line in _lines(tries, split=split):
                lines.append(line)
                print(report.line_text(line), flush=True)
    except (NotStarted, LoadFailed) as error:
        sys.exit(f"bench: {error}")
    written = report.write(lines, system.ROOT / "bench" / "results")
    print(f"written to {written.relative_to(system.ROOT)}")
    if any(line.over for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
