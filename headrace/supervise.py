"""Processes that are kept running: started, watched, brought back, and stopped in order.

Each child leads a session of its own, so that a Ctrl-C on the terminal reaches only us and a
SIGKILL reaches everything it has started. Linux sends a child SIGTERM when we die; what survives
even that is ended by the next `up` from the run file.
"""

import asyncio
import contextlib
import ctypes
import http.client
import json
import logging
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from headrace.datadir import ProcessRecord, ProcessState, started_s
from headrace.restart import Restarts
from headrace.sockets import CannotListen

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S: Final = 1.0
PROBE_EVERY_S: Final = 0.1
PROBE_READY_EVERY_S: Final = 1.0
KILL_MARGIN_S: Final = 4.0
"""A child is given its own grace and this much more, so that it can end by itself: it closes its
connections behind the grace, and clients that do not read make it wait for a second."""
_PR_SET_PDEATHSIG: Final = 1


class Died(Exception):
    """A process ended before it was ready."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. `argv` is asked at each start for the command that serves on an admin port."""

    name: str
    tier: str
    argv: Callable[[int], Sequence[str]]
    environ: Mapping[str, str]
    admin_port: Callable[[], int]
    grace_s: float
    ready_path: str = "/readyz"
    log: str = "its log"
    """Where to look when it ends before it is ready."""


@dataclass(slots=True, eq=False)
class Child:
    """A process that is kept running, and what is known of it."""

    command: Command
    process: Process | None = None
    started_s: float = 0.0
    admin_url: str = ""
    state: ProcessState = "starting"
    announced: bool = False
    restarts: Restarts = field(default_factory=Restarts)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def dead(self) -> bool:
        """Whether it has ended and is not yet back."""
        return self.state == "dead"

    @property
    def record(self) -> ProcessRecord:
        """What the run file says of it."""
        return ProcessRecord(
            name=self.command.name,
            tier=self.command.tier,
            pid=self.process.pid if self.process is not None else 0,
            started_s=self.started_s,
            state=self.state,
            admin_url=self.admin_url,
        )

    async def next_change(self) -> None:
        """Wait until something becomes known of it."""
        self.changed.clear()
        await self.changed.wait()

    async def stopped_within(self, wait_s: float) -> None:
        """Wait so long, or until it is to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.stopping.wait()


class Supervisor:
    """Keeps processes running. Made by `supervising`, which stops them all at its end."""

    def __init__(
        self, group: asyncio.TaskGroup, on_change: Callable[[Sequence[ProcessRecord]], None]
    ) -> None:
        self._group = group
        self._on_change = on_change
        self._children: list[Child] = []
        self._sessions: set[int] = set()

    async def start(self, command: Command) -> Child:
        """Start a process and keep it running."""
        child = Child(command)
        self._children.append(child)
        # Tasks of the group start it: a caller that is cancelled meanwhile cannot lose it.
        self._group.create_task(self._keep(child), name=f"keep {command.name}")
        self._group.create_task(self._probe(child), name=f"probe {command.name}")
        while child.process is None:
            await child.next_change()
        return child

    async def ready(self, child: Child, *, deaths_max: int = 0) -> None:
        """Wait until a process is ready. Raises Died when it ends more often than that before."""
        while child.state != "ready":
            if child.restarts.deaths > deaths_max:
                command = child.command
                raise Died(f"{command.name} ended before it was ready; {command.log} says why")
            await child.next_change()

    async def once(self, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
        """Run a command to its end; return its status and what it wrote to stdout."""
        starting = asyncio.create_task(self._exec(argv, environ, stdout=PIPE))
        try:
            process = await asyncio.shield(starting)
            output, _ = await process.communicate()
        finally:
            # Also when the cancellation came while it started: it may run already.
            await self._reap(await starting)
        return await process.wait(), output.decode(errors="replace")

    async def stop(self, tiers: Iterable[str]) -> None:
        """Stop all processes, one tier after the other, each within its grace."""
        for child in self._children:
            child.stopping.set()
        for tier in tiers:
            await asyncio.gather(
                *(self._stop(child) for child in self._children if child.command.tier == tier)
            )
        self.kill()

    def kill(self) -> None:
        """End all processes and what they have started, at once. Never waits, never raises."""
        for session in self._sessions:
            _kill_session(session)

    async def _stop(self, child: Child) -> None:
        async with child.starting:
            process = child.process
        if process is None or process.returncode is not None:
            return
        self._changed(child, "draining")
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(child.command.grace_s + KILL_MARGIN_S):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not end within its grace and is killed", child.command.name)
        await self._reap(process)
        self._changed(child, "dead")

    async def _keep(self, child: Child) -> None:
        while not child.stopping.is_set():
            began_s = time.monotonic()
            try:
                process = await self._spawn(child)
            except (OSError, CannotListen) as error:
                if child.process is None:
                    raise  # it never ran: a refusal
                status = f"before it began ({error})"
            else:
                if process is None:
                    return
                status = f"with status {await process.wait()}"
                await self._reap(process)
            self._changed(child, "dead")
            if child.stopping.is_set():
                return
            lived_s = time.monotonic() - began_s
            child.restarts, delay_s = child.restarts.after(lived_s=lived_s)
            log.warning(
                "%s ended %s after %.1f s; starts again in %.1f s",
                child.command.name, status, lived_s, delay_s,
            )  # fmt: skip
            child.changed.set()
            await child.stopped_within(delay_s)

    async def _spawn(self, child: Child) -> Process | None:
        """Start a child's process, unless it is to stop."""
        command = child.command
        async with child.starting:
            if child.stopping.is_set():
                return None
            port = command.admin_port()
            child.process = await self._exec(command.argv(port), command.environ)
            child.started_s = started_s(child.process.pid) or time.time()
            child.admin_url = f"http://127.0.0.1:{port}"
            child.announced = False
        self._changed(child, "starting")
        return child.process

    async def _exec(
        self, argv: Sequence[str], environ: Mapping[str, str], *, stdout: int | None = None
    ) -> Process:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=dict(environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            start_new_session=True,
            preexec_fn=tied_to(os.getpid()),
        )
        self._sessions.add(process.pid)
        return process

    async def _reap(self, process: Process) -> None:
        """Wait for a process that ended or must; what is left in its session is killed with it."""
        _kill_session(process.pid)
        await process.wait()
        self._sessions.discard(process.pid)

    async def _probe(self, child: Child) -> None:
        while not child.stopping.is_set():
            process = child.process
            if process is not None and not child.dead:
                url = child.admin_url + child.command.ready_path
                state = await asyncio.to_thread(_state_at, url)
                # The process may have ended, another begun, or the stop come, while we asked.
                if child.process is process and not child.dead and not child.stopping.is_set():
                    self._changed(child, state)
            await child.stopped_within(
                PROBE_READY_EVERY_S if child.state == "ready" else PROBE_EVERY_S
            )

    def _changed(self, child: Child, state: ProcessState) -> None:
        if child.state == state and state != "starting":
            return
        child.state = state
        if state == "ready" and not child.announced:
            child.announced = True
            log.info("%s is ready", child.command.name)
        child.changed.set()
        self._on_change([known.record for known in self._children])


@asynccontextmanager
async def supervising(
    *,
    stop_order: Sequence[str],
    on_change: Callable[[Sequence[ProcessRecord]], None],
) -> AsyncIterator[Supervisor]:
    """Keep processes for the length of a block; then stop them, tier by tier.

    `on_change` is told of every change. A failure of ours leaves as an ExceptionGroup.
    """
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, on_change)
        try:
            yield supervisor
        finally:
            await supervisor.stop(stop_order)


def _kill_session(session: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def tied_to(parent: int) -> Callable[[], None] | None:
    """Return what a child does before it becomes the command: ask to be ended with its parent.

    It runs between fork and exec, so it only makes system calls. The kernel sends the signal when
    the thread that forked ends; ours is the main thread.
    """
    prctl = _prctl
    if prctl is None:
        return None

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return tie


_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def _state_at(url: str) -> ProcessState:
    """Ask a process for its state; what does not answer, or not to its end, is still starting."""
    try:
        return _said_at(url)
    except (OSError, ValueError, http.client.HTTPException):
        return "starting"


def _said_at(url: str) -> ProcessState:
    try:
        with _open(url, timeout=PROBE_TIMEOUT_S) as answer:
            return _state_in(answer.read(), "ready")
    except urllib.error.HTTPError as answer:
        with answer:
            return _state_in(answer.read(), "starting")


def _state_in(body: bytes, otherwise: ProcessState) -> ProcessState:
    try:
        said = json.loads(body).get("state", otherwise)
    except (ValueError, AttributeError):
        return otherwise
    return said if said in ("starting", "ready", "draining") else otherwise
