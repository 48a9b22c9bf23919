"""`python -m bench.saturation`: what limits cost, and what becomes of requests beyond capacity.

The load is open: requests come by a clock (Poisson, a fixed seed), whoever has been answered. Its
client is this process; the gateway's CPU and memory are the gateway's own.
"""

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Final

import psutil
import typer
import uvloop

from bench import report, system
from bench.load import chat
from bench.plan import percentile
from bench.rows import INSTANT, MIB, Line
from headrace.bus import Bus, BusSettings, connection
from ingress.limits import Limits
from ingress.reservations import Reservations
from schemas.subjects import new_request_id

SLOTS: Final = 16
TOKENS: Final = 10
ITL_MS: Final = 50.0
SERVICE_S: Final = TOKENS * ITL_MS / 1000
BELOW: Final = 0.8
ABOVE: Final = 1.5
IN_FLIGHT: Final = 32
CLOSED_S: Final = 4.0
RESERVATIONS: Final = 1000
KEY: Final = "sk-bench"
LARGE: Final = 10**9


def _config(terms: str) -> str:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    return f'[[tenants]]\nname = "t"\n{terms}\n[[keys]]\ntenant = "t"\nsha256 = "{digest}"\n'


LIMITED: Final = _config(
    f"requests_per_minute = {LARGE}\ntokens_per_minute = {LARGE}\nconcurrent_requests = {LARGE}"
)
BOUNDED: Final = _config(f"concurrent_requests = {SLOTS}")
BOUNDED_BY_AGE: Final = "queue_patience_s = 0.2\n" + _config("")


@dataclass
class Seen:
    """What the clients saw, in seconds: waits for the first event, and for a refusal."""

    ttft_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    failed: int = 0


def _request(*, stream: bool, tokens: int, **more: object) -> bytes:
    body = json.dumps(chat("Tell me about rivers.", tokens=tokens, stream=stream, **more)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Clients:
    """Connections that are kept and used again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, seen: Seen) -> None:
        """Send one request and read its answer to the end."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        begin_s = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 200"):
            await self._stream(reader, head, seen, begin_s)
        else:
            await reader.readexactly(_length(head))
            if head.startswith(b"HTTP/1.1 429"):
                seen.refused_s.append(time.perf_counter() - begin_s)
            else:
                seen.failed += 1
        self._idle.append((reader, writer))

    async def _stream(
        self, reader: asyncio.StreamReader, head: bytes, seen: Seen, begin_s: float
    ) -> None:
        if b"content-length" in head.lower():
            await reader.readexactly(_length(head))
            seen.ttft_s.append(time.perf_counter() - begin_s)
            return
        data = b""
        while b"data:" not in data:
            data += await reader.read(65536)
        seen.ttft_s.append(time.perf_counter() - begin_s)
        while not data.endswith(b"0\r\n\r\n"):
            data = data[-5:] + await reader.read(65536)
        seen.failed += b"[DONE]" not in data and b'"error"' in data

    def close(self) -> None:
        """Close them all."""
        for _, writer in self._idle:
            writer.close()


def _length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    [value] = [line.split(b":")[1] for line in lines if line.startswith(b"content-length")]
    return int(value)


async def _open_load(port: int, *, per_s: float, seconds: float) -> Seen:
    """Send requests by the clock, and wait for all of their answers."""
    seen, clients, dice = Seen(), Clients(port), random.Random(7)
    sim = {"ttft_ms": ITL_MS, "itl_ms": ITL_MS}
    request = _request(stream=True, tokens=TOKENS, sim=sim)
    begin_s = at_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        while at_s < begin_s + seconds:
            await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
            group.create_task(clients.ask(request, seen))
            at_s += dice.expovariate(per_s)
    clients.close()
    return seen


def _overload(name: str, config: str, seconds: float, *, bounded: bool = True) -> Iterator[Line]:
    """Load a system below and above its capacity; unless `bounded`, requests may wait for 30 s."""
    capacity_per_s = SLOTS / SERVICE_S
    args = {"max_num_seqs": SLOTS}
    with system.running(sim=INSTANT, config=config, engine_args=args) as running:
        time.sleep(2.0)  # the model's card, and the slots of its worker
        gateway = psutil.Process(running.gateway)
        below = uvloop.run(_open_load(running.port, per_s=BELOW * capacity_per_s, seconds=seconds))
        before = gateway.memory_info().rss
        above = uvloop.run(_open_load(running.port, per_s=ABOVE * capacity_per_s, seconds=seconds))
        grown = (gateway.memory_info().rss - before) / MIB
    below_ms, above_ms = (1e3 * percentile(seen.ttft_s, 0.95) for seen in (below, above))
    share = f"{len(above.ttft_s)} answered, {len(above.refused_s)} refused, {above.failed} failed"
    promised_ms = 2 * below_ms if bounded else None
    yield Line(name, f"TTFT p95 at {BELOW} × capacity", "ms", below_ms)
    yield Line(name, f"TTFT p95 at {ABOVE} ×", "ms", above_ms, below_ms, promised_ms, share)
    refused_ms = 1e3 * percentile(above.refused_s, 0.99)
    yield Line(name, "a refusal, p99", "ms", refused_ms, None, 20.0)
    held_mib = 16.0 if bounded else None
    yield Line(name, "gateway's memory, growth", "MiB", grown, None, held_mib)


async def _closed_load(port: int) -> int:
    """Keep so many unstreamed requests in flight for a while; return how many were answered."""
    seen, clients = Seen(), Clients(port)
    request = _request(stream=False, tokens=1)
    until_s = time.perf_counter() + CLOSED_S

    async def one() -> None:
        while time.perf_counter() < until_s:
            await clients.ask(request, seen)

    await asyncio.gather(*[one() for _ in range(IN_FLIGHT)])
    clients.close()
    if seen.failed or seen.refused_s:
        raise SystemExit(f"{seen.failed} failed, {len(seen.refused_s)} were refused")
    return len(seen.ttft_s)


def _gateway_us(config: str) -> float:
    """Return the gateway's CPU per request."""
    with system.running(sim=INSTANT, config=config) as running:
        time.sleep(2.0)
        gateway = psutil.Process(running.gateway)
        uvloop.run(_closed_load(running.port))  # warm
        figures = []
        for _ in range(3):
            before = sum(gateway.cpu_times()[:2])
            count = uvloop.run(_closed_load(running.port))
            figures.append(1e6 * (sum(gateway.cpu_times()[:2]) - before) / count)
    return median(figures)


def _cost() -> Iterator[Line]:
    open_us = _gateway_us("")
    keyed_us = _gateway_us(_config(""))
    limited_us = _gateway_us(LIMITED)
    unit = "µs/request"
    yield Line("cost", "gateway, neither key nor limits, 32 in flight", unit, open_us)
    yield Line("cost", "gateway, key", unit, keyed_us, open_us)
    yield Line("cost", "gateway, key and three limits", unit, limited_us, open_us)
    yield Line("cost", "auth + limiter", unit, limited_us - open_us, None, 300.0)


async def _reserve(node: Reservations, waits_s: list[float]) -> None:
    request = new_request_id()
    begin_s = time.perf_counter()
    await node.reserve("bench", request=request, tokens=100, deadline_s=time.time() + 60)
    waits_s.append(time.perf_counter() - begin_s)
    node.settle("bench", request=request, tokens=50)


async def _reservations(url: str) -> list[float]:
    """Return the median waits for a reservation: alone, and with 50 at once."""

    async def measure(bus: Bus, at_once: int) -> float:
        limits = Limits(LARGE, LARGE, None, LARGE)
        node = Reservations(bus, lambda tenant: limits, clock=time.time)
        waits_s: list[float] = []
        for _ in range(RESERVATIONS // at_once):
            await asyncio.gather(*[_reserve(node, waits_s) for _ in range(at_once)])
            await asyncio.sleep(0.002)  # the settlements
        return median(waits_s)

    async with connection(BusSettings(url), name="bench", timeout_s=10) as bus:
        return [await measure(bus, 1), await measure(bus, 50)]


def _waits() -> Iterator[Line]:
    with system.running(sim=None) as running:
        alone_s, crowded_s = uvloop.run(_reservations(running.nats_url))
    yield Line("reserve", "a reservation alone, p50", "ms", 1e3 * alone_s, None, 1.0)
    yield Line("reserve", "50 at once, p50", "ms", 1e3 * crowded_s, None, 1.0)


def main(
    seconds: Annotated[float, typer.Option(help="How long each load lasts.")] = 60.0,
    only: Annotated[list[str] | None, typer.Option(help="Row to measure; all without.")] = None,
) -> None:
    """Measure what limits cost, and load a system beyond its capacity."""
    lines: list[Line] = []
    rows: dict[str, Callable[[], Iterator[Line]]] = {
        "reserve": _waits,
        "cost": _cost,
        "bounded": lambda: _overload("bounded", BOUNDED, seconds),
        "by age": lambda: _overload("by age", BOUNDED_BY_AGE, seconds),
        "unbounded": lambda: _overload("unbounded", _config(""), seconds, bounded=False),
    }
    print(report.heading(), flush=True)
    for name in only or rows:
        for line in rows[name]():
            lines.append(line)
            print(report.line_text(line), flush=True)
    written = report.write(lines, system.ROOT / "bench" / "results")
    print(f"written to {written.relative_to(system.ROOT)}")


if __name__ == "__main__":
    typer.run(main)
