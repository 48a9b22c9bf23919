"""The load: `python -m bench.client`, with a plan on stdin and the outcome on stdout.

Rule: cheap enough not to be the bottleneck. Events are counted by their blank lines, bodies are
not decoded; how many there were in all is checked at the end of each stream.
"""

import asyncio
import re
import resource
import sys
import time
from collections.abc import Callable
from typing import Final, assert_never, cast

import msgspec
import psutil
import uvloop
from websockets.asyncio.client import connect

from bench.plan import Outcome, Plan, Target, percentile

_LAST_CHUNK: Final = b"0\r\n\r\n"
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
POLL_S: Final = 0.005
SETTLE_S: Final = 2.0
PATIENCE_S: Final = 60.0


class BadAnswer(Exception):
    """The server did not answer as it must."""


def request_bytes(path: str, body: str) -> bytes:
    """Return a POST as it goes over the wire."""
    content = body.encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Stream(asyncio.Protocol):
    """A connection that reads one event stream at a time."""

    def __init__(self, *, timed: bool = False) -> None:
        self.events = 0
        self.ended = False
        self.gaps_s: list[float] = []
        self.heard_s = 0.0
        self.headed: Callable[[], None] | None = None
        self.first: Callable[[], None] | None = None
        self.over: Callable[[], None] | None = None
        self._timed = timed
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def send(self, request: bytes) -> None:
        """Send a request; its answer is counted from 0."""
        assert self._transport is not None
        self.events = 0
        self.ended = False
        self._tail = b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self.headed is not None:
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"not accepted: {data[:300]!r}")
            headed, self.headed = self.headed, None
            headed()
        found = data.count(b"\n\n") + (data[:1] == b"\n" and self._tail[-1:] == b"\n")
        if found:
            self.events += found
            if self._timed:
                now_s = time.perf_counter()
                self.gaps_s.append(now_s - self.heard_s)
                self.gaps_s.extend([0.0] * (found - 1))
                self.heard_s = now_s
            if self.first is not None:
                first, self.first = self.first, None
                first()
        self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        if self._tail == _LAST_CHUNK:
            self.ended = True
            if self.over is not None:
                over, self.over = self.over, None
                over()

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()


class Whole(asyncio.Protocol):
    """A connection that sends its next request as soon as it has the answer."""

    def __init__(self, requests: list[bytes], answered: Callable[[], None]) -> None:
        self._requests = requests
        self._answered = answered
        self._turn = 0
        self._missing = -1
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self.stopped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        if self.stopped:
            self._transport.close()
            return
        self._transport.write(self._requests[self._turn % len(self._requests)])
        self._turn += 1

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._head, 0, end)
            if length is None or not self._head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"not answered: {self._head[:300]!r}")
            self._missing = int(length[1]) + end + 4 - len(self._head)
            self._head = b""
        else:
            self._missing -= len(data)
        if self._missing == 0:
            self._missing = -1
            self._answered()
            self._next()


class Meter:
    """CPU and wall time of the measured processes between two looks."""

    def __init__(self, targets: list[Target]) -> None:
        self._processes = {
            name: psutil.Process(pid) for target in targets for name, pid in target.pids.items()
        }
        self._self = psutil.Process()

    def start(self) -> None:
        """Look for the first time."""
        self._begin_s = time.perf_counter()
        self._machine_s = _busy_s()
        self._own_s = _cpu_s(self._self)
        self._cpu_s = {name: _cpu_s(process) for name, process in self._processes.items()}

    def stop(self, units: int) -> Outcome:
        """Look again, and return the differences."""
        wall_s = time.perf_counter() - self._begin_s
        cpu_s = {n: _cpu_s(p) - self._cpu_s[n] for n, p in self._processes.items()}
        own_s = _cpu_s(self._self) - self._own_s
        foreign_s = _busy_s() - self._machine_s - own_s - sum(cpu_s.values())
        cpu_s["client"] = own_s
        return Outcome(
            units=units, cpu_s=cpu_s, wall_s=wall_s, foreign_cores=max(0.0, foreign_s / wall_s)
        )

    def memory(self) -> dict[str, int]:
        """Return resident bytes by process."""
        return {name: process.memory_info().rss for name, process in self._processes.items()}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


async def _until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.perf_counter() + PATIENCE_S
    while not condition():
        if time.perf_counter() > deadline_s:
            raise BadAnswer(f"waited {PATIENCE_S:g} s for {what}")
        await asyncio.sleep(POLL_S)


async def _open(target: Target, count: int, *, timed: bool = False) -> list[Stream]:
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(count):
        _, stream = await loop.create_connection(
            lambda: Stream(timed=timed), "127.0.0.1", target.port
        )
        streams.append(stream)
    return streams


async def paced(plan: Plan, meter: Meter) -> Outcome:
    """Measure streams in full flow."""
    [target] = plan.targets
    streams = await _open(target, len(plan.bodies), timed=True)
    for stream, body in zip(streams, plan.bodies, strict=True):
        stream.send(request_bytes(target.path, body))
    await _until(lambda: all(s.events >= plan.warm for s in streams), "the streams to flow")
    meter.start()
    before = sum(stream.events for stream in streams)
    for stream in streams:
        stream.gaps_s.clear()
    await asyncio.sleep(plan.window_s)
    outcome = meter.stop(sum(stream.events for stream in streams) - before)
    if any(stream.ended for stream in streams):
        raise BadAnswer("a stream ended within the window: the machine is too slow for this load")
    gaps_s = [gap_s for stream in streams for gap_s in stream.gaps_s]
    outcome.p50_s, outcome.p99_s = [percentile(gaps_s, 0.5)], [percentile(gaps_s, 0.99)]
    await _until(lambda: all(stream.ended for stream in streams), "the streams to end")
    wrong = {stream.events for stream in streams} - {plan.events}
    if wrong:
        raise BadAnswer(f"streams of {wrong} events instead of {plan.events}")
    for stream in streams:
        stream.close()
    return outcome


async def closed(plan: Plan, meter: Meter) -> Outcome:
    """Measure unstreamed requests, so many in flight all the time."""
    [target] = plan.targets
    requests = [request_bytes(target.path, body) for body in plan.bodies]
    answers = 0

    def answered() -> None:
        nonlocal answers
        answers += 1

    loop = asyncio.get_running_loop()
    callers = []
    for index in range(plan.in_flight):
        turned = requests[index:] + requests[:index]
        _, caller = await loop.create_connection(
            lambda turned=turned: Whole(turned, answered),  # type: ignore[misc]
            "127.0.0.1",
            target.port,
        )
        callers.append(caller)
    await _until(lambda: answers >= plan.warm, "the first answers")
    meter.start()
    before = answers
    await asyncio.sleep(plan.window_s)
    outcome = meter.stop(answers - before)
    for caller in callers:
        caller.stopped = True
    await asyncio.sleep(0.2)
    return outcome


async def accept(plan: Plan, meter: Meter) -> Outcome:
    """Measure from the request to the head of its answer."""
    [target] = plan.targets
    streams = await _open(target, len(plan.bodies))
    requests = [request_bytes(target.path, body) for body in plan.bodies]
    waiting = iter(zip(streams, requests, strict=True))
    headed = 0

    def head() -> None:
        nonlocal headed
        headed += 1
        send_next()

    def send_next() -> None:
        pair = next(waiting, None)
        if pair is not None:
            stream, request = pair
            stream.headed = head
            stream.send(request)

    for _ in range(plan.in_flight):
        send_next()
    await _until(lambda: headed >= plan.warm, "the first heads")
    meter.start()
    before = headed
    await _until(lambda: headed == len(streams), "all heads")
    outcome = meter.stop(headed - before)
    for stream in streams:
        stream.close()
    await asyncio.sleep(SETTLE_S)
    return outcome


async def first(plan: Plan, meter: Meter) -> Outcome:
    """Measure the wait for the first event, at each target in turn."""
    streams = [(target, (await _open(target, 1))[0]) for target in plan.targets]
    seconds: list[list[float]] = [[] for _ in streams]
    meter.start()
    for number, body in enumerate(plan.bodies):
        for (target, stream), waits_s in zip(streams, seconds, strict=True):
            wait_s = await _first_event(stream, request_bytes(target.path, body))
            if stream.events != plan.events:
                raise BadAnswer(f"{stream.events} events instead of {plan.events}")
            if number >= plan.warm:
                waits_s.append(wait_s)
            await asyncio.sleep(0.002)  # apart, so that one's end does not delay the next
    outcome = meter.stop(len(seconds[0]))
    outcome.p50_s = [percentile(waits_s, 0.5) for waits_s in seconds]
    outcome.p99_s = [percentile(waits_s, 0.99) for waits_s in seconds]
    return outcome


async def _first_event(stream: Stream, request: bytes) -> float:
    """Return how long the first event took, once the stream is over."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    heard_s = 0.0

    def heard() -> None:
        nonlocal heard_s
        heard_s = time.perf_counter()

    stream.first = heard
    stream.over = lambda: over.set_result(None)
    begin_s = time.perf_counter()
    stream.send(request)
    await over
    return heard_s - begin_s


async def hold(plan: Plan, meter: Meter) -> Outcome:
    """Measure the memory of streams that have begun and are quiet."""
    [target] = plan.targets
    before = meter.memory()
    streams = await _open(target, len(plan.bodies))
    for stream, body in zip(streams, plan.bodies, strict=True):
        stream.send(request_bytes(target.path, body))
    await _until(lambda: all(stream.events for stream in streams), "the first tokens")
    await asyncio.sleep(SETTLE_S)
    growth = {name: size - before[name] for name, size in meter.memory().items()}
    for stream in streams:
        stream.close()
    return Outcome(units=len(streams), memory_bytes=growth)


async def hold_sockets(plan: Plan, meter: Meter) -> Outcome:
    """Measure the memory of WebSockets with one stream each that has begun and is quiet."""
    [target] = plan.targets
    before = meter.memory()
    sockets = []
    for body in plan.bodies:
        url = f"ws://127.0.0.1:{target.port}{target.path}"
        sockets.append(await connect(url, compression=None, proxy=None))
        await sockets[-1].send(f'{{"id":"a","body":{body}}}')
        await sockets[-1].recv()
    await asyncio.sleep(SETTLE_S)
    growth = {name: size - before[name] for name, size in meter.memory().items()}
    for socket in sockets:
        socket.transport.abort()
    return Outcome(units=len(sockets), memory_bytes=growth)


async def _run(plan: Plan) -> Outcome:
    meter = Meter(plan.targets)
    match plan.kind:
        case "paced":
            return await paced(plan, meter)
        case "closed":
            return await closed(plan, meter)
        case "accept":
            return await accept(plan, meter)
        case "first":
            return await first(plan, meter)
        case "hold":
            return await hold(plan, meter)
        case "sockets":
            return await hold_sockets(plan, meter)
        case _:
            assert_never(plan.kind)


def main() -> None:
    """Read a plan, do it, write the outcome."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    try:
        outcome = uvloop.run(_run(plan))
    except (BadAnswer, OSError) as error:
        sys.exit(f"bench.client: {plan.kind}: {error}")
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
