"""The processes that suffer, and what is done to them.

Rule: every process is ours, by its pid, on loopback ports that it keeps, and is gone when the block
ends. What ends without being told to is noted: that is a finding.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from chaos.client import Doors
from chaos.faults import Fault, Kind, Tier
from chaos.http import Cut, exchange
from chaos.links import HOST, Link
from chaos.orders import MODEL
from headrace import topology
from headrace.broker import find_binary
from headrace.bus import Bus, BusSettings, connect
from headrace.sockets import reserve
from headrace.supervise import tied_to

ROOT: Final = Path(__file__).resolve().parent.parent
START_S: Final = 180.0
GRACE_S: Final = 3.0
STOP_S: Final = GRACE_S + 57.0
"""Its grace, what it may spend on a broker that does not answer (27 s), and patience with the
machine: a process that hangs does not end at all."""
AGAIN_S: Final = 0.5
"""The pause before a process that ended by itself is started again."""
PROBE_S: Final = 0.1
PROBE_TIMEOUT_S: Final = 10.0
PAGE_TIMEOUT_S: Final = 10.0
SIM: Final = '{"step_us": 15000}'
WORKERS: Final = 3
GAUGES: Final = re.compile(r"^(headrace_\w+_(?:inflight|waiting|running|open))(?:\{.*\})? (\S+)$")


class NotStarted(Exception):
    """A process did not come up; the message holds the end of its log."""


@dataclass(eq=False)
class Node:
    """A process that is started again and again with one command."""

    name: str
    tier: Tier
    command: Sequence[str]
    log: Path
    ready_url: str
    url: str = ""
    """Where it serves clients."""
    link: Link | None = None
    ended_by_itself: list[str] = field(default_factory=list)
    ended_while_starting: int = 0
    """It came too early: a supervisor brings it back, and so do we."""
    slow_to_stop: int = 0
    starts: int = 0
    suffers: bool = False
    """A fault happens to it, or it is not yet ready after one."""
    _process: asyncio.subprocess.Process | None = None
    _watch: asyncio.Task[None] | None = None
    _told: bool = False
    _was_ready: bool = False

    async def start(self) -> None:
        """Start the process; it is not ready yet."""
        environ = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
        path = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.log.parent,
                env=environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=tied_to(os.getpid()),
            )
        self.starts += 1
        self._told = self._was_ready = False
        self._watch = asyncio.create_task(self._watched(self._process), name=self.name)

    async def _watched(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if self._told:
            return
        if self._was_ready:
            self.ended_by_itself.append(f"{self.name} ended by itself with status {status}")
        else:
            self.ended_while_starting += 1
        await asyncio.sleep(AGAIN_S)
        await self.start()

    async def ready(self) -> None:
        """Wait until it says that it is ready. Raises NotStarted."""
        try:
            async with asyncio.timeout(START_S):
                # Another process's state: there is nothing to be woken by.
                while not await _answers(self.ready_url):  # noqa: ASYNC110
                    await asyncio.sleep(PROBE_S)
            self._was_ready = True
        except TimeoutError:
            said = self.log.read_text(errors="replace")[-2000:]
            raise NotStarted(f"{self.name} is not ready after {START_S:g} s:\n{said}") from None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._told = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def gone(self) -> None:
        """Wait until the process has ended; past its grace it is killed, which is noted."""
        assert self._process is not None
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self.slow_to_stop += 1
            self.signal(signal.SIGKILL)
            await self._process.wait()

    async def end(self) -> None:
        """End the process for good."""
        if self._process is not None and self._process.returncode is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            await self.gone()

    async def suffer(self, fault: Fault) -> None:
        """Have a fault happen, from its beginning until all is well again. Raises NotStarted."""
        self.suffers = True
        try:
            await self._suffer(fault)
            await self.ready()
        finally:
            self.suffers = False

    async def _suffer(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL | Kind.RESTART:
                self.signal(signal.SIGKILL if fault.kind is Kind.KILL else signal.SIGTERM)
                await self.gone()
                await asyncio.sleep(fault.lasts_s)
                await self.start()
            case Kind.FREEZE:
                self.signal(signal.SIGSTOP)
                await asyncio.sleep(fault.lasts_s)
                self.signal(signal.SIGCONT)
            case Kind.CUT | Kind.HOLD | Kind.SWALLOW:
                await self._cut_off(fault)

    async def _cut_off(self, fault: Fault) -> None:
        assert self.link is not None
        match fault.kind:
            case Kind.HOLD:
                self.link.hold()
            case Kind.SWALLOW:
                self.link.swallow()
            case _:
                self.link.cut()
        await asyncio.sleep(fault.lasts_s)
        self.link.mend()

    async def gauges(self) -> dict[str, float]:
        """Return the gauges of load that are not 0. Raises Cut."""
        base = self.ready_url.rpartition("/")[0]
        page = await _page(f"{base}/metrics")
        found = (GAUGES.match(line) for line in page.splitlines())
        return {match[1]: float(match[2]) for match in found if match and float(match[2])}


@dataclass(frozen=True)
class System:
    """Everything that runs, by name; `bus` is our own connection to NATS, through no link."""

    nodes: dict[str, Node]
    doors: Doors
    bus: Bus

    @property
    def targets(self) -> dict[str, Tier]:
        """What may suffer."""
        return {name: node.tier for name, node in self.nodes.items()}

    async def queued(self) -> int:
        """Return how many requests are in REQUESTS, counted by their subjects.

        nats-server's total alone can stay too high after a purge of single messages. Raises
        BrokerAway.
        """
        info = await self.bus.api("STREAM.INFO.REQUESTS", {"subjects_filter": "requests.>"})
        return sum((info["state"].get("subjects") or {}).values())

    async def busy(self) -> dict[str, float]:
        """Return what is not at rest: gauges of load, by node, and the queue.

        Raises Cut and BrokerAway.
        """
        found: dict[str, float] = {}
        for node in self.nodes.values():
            if node.tier != "nats":
                found |= {f"{node.name} {name}": n for name, n in (await node.gauges()).items()}
        queued = await self.queued()
        return found | ({"REQUESTS": queued} if queued else {})


class _Ports:
    """Ports that stay ours: nobody else is given one while its process is away."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack

    def take(self) -> int:
        keeper: socket.socket = self._stack.enter_context(reserve(HOST, 0))
        port: int = keeper.getsockname()[1]
        return port


@asynccontextmanager
async def running(folder: Path, *, split: bool) -> AsyncIterator[System]:
    """Run a system for the length of a block; data and logs lie in `folder`. Raises NotStarted."""
    async with contextlib.AsyncExitStack() as stack:
        ports = _Ports(stack)
        nats = _nats(folder, ports)
        stack.push_async_callback(nats.end)
        await nats.start()
        await nats.ready()
        bus = await connect(BusSettings(nats.url), name="chaos", timeout_s=START_S)
        stack.push_async_callback(bus.close)
        await topology.apply(bus)
        fronts = ("ingress", "streamer") if split else ("gateway",)
        names = [f"{module}-{number}" for module in fronts for number in (1, 2)]
        names += [f"worker-{number}" for number in range(1, WORKERS + 1)]
        nodes = [await _node(name, folder, ports, nats, stack) for name in names]
        for node in nodes:
            await node.start()
        stack.push_async_callback(_end_all, nodes)
        await asyncio.gather(*(node.ready() for node in nodes))
        doors = Doors(
            posts=tuple(node.url for node in nodes if node.name.startswith(fronts[0])),
            reads=tuple(node.url for node in nodes if node.name.startswith(fronts[-1])),
        )
        await asyncio.gather(*(_offering(url) for url in doors.posts))
        yield System({node.name: node for node in (nats, *nodes)}, doors, bus)


async def _offering(url: str) -> None:
    """Wait until a door knows the model: it is ready without any. Raises NotStarted."""
    try:
        async with asyncio.timeout(START_S):
            while not await _lists(url):  # noqa: ASYNC110
                await asyncio.sleep(PROBE_S)
    except TimeoutError:
        raise NotStarted(f"{url} does not know {MODEL} after {START_S:g} s") from None


async def _lists(url: str) -> bool:
    try:
        return f'"{MODEL}"' in await _page(f"{url}/v1/models")
    except Cut:
        return False


async def _end_all(nodes: Sequence[Node]) -> None:
    await asyncio.gather(*(node.end() for node in nodes))


def _nats(folder: Path, ports: _Ports) -> Node:
    port, monitor_port = ports.take(), ports.take()
    config = folder / "nats.conf"
    config.write_text(
        f'listen: "{HOST}:{port}"\nhttp: "{HOST}:{monitor_port}"\nmax_payload: 8MB\n'
        f'jetstream {{ store_dir: "{folder / "jetstream"}" }}\n'
    )
    return Node(
        "nats",
        "nats",
        [str(find_binary()), "--config", str(config)],
        folder / "nats.log",
        f"http://{HOST}:{monitor_port}/healthz",
        url=f"nats://{HOST}:{port}",
    )


async def _node(
    name: str, folder: Path, ports: _Ports, nats: Node, stack: contextlib.AsyncExitStack
) -> Node:
    module = name.partition("-")[0]
    worker = module == "worker"
    link = Link(int(nats.url.rpartition(":")[2]))
    await link.open()
    stack.push_async_callback(link.close)
    port, admin_port = ports.take(), ports.take()
    command = [sys.executable, "-m", "workers" if worker else module, "--nats-url", link.url]
    command += ["--name", name, "--admin-port", str(admin_port), "--grace-s", str(GRACE_S)]
    command += ["--sim", SIM] if worker else ["--port", str(port)]
    return Node(
        name,
        "worker" if worker else "front",
        command,
        folder / f"{name}.log",
        f"http://{HOST}:{admin_port}/readyz",
        url="" if worker else f"http://{HOST}:{port}",
        link=link,
    )


async def _answers(url: str) -> bool:
    try:
        async with exchange("GET", url, head_s=PROBE_TIMEOUT_S) as answer:
            return answer.status == 200
    except Cut:
        return False


async def _page(url: str) -> str:
    async with exchange("GET", url, head_s=PAGE_TIMEOUT_S) as answer:
        return (await answer.body(silence_s=PAGE_TIMEOUT_S)).decode()
