"""Real servers for tests: a nats-server, and our own processes, each on ports of its own."""

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.waiting import wait_for

ROOT = Path(__file__).parents[1]
START_S_MAX = 60.0
PORTS = range(12_000, 32_000)
"""Outside the range that the kernel takes clients' ports from: none of them can have one."""


NEIGHBOURS = 8
"""So many ports in a row are one server's, as `headrace up --split` takes them."""


def _ports() -> Iterator[int]:
    """Yield this process's own part of the ports, from anywhere on and over again: each is given
    to one server, and no other process of the same run can ask for it."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    size = len(PORTS) // count
    # One that stands in for a crashed process has a number beyond the count.
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % count
    own = PORTS[number * size : (number + 1) * size : NEIGHBOURS]
    begin = secrets.randbelow(len(own))
    return itertools.cycle((*own[begin:], *own[:begin]))


_NEXT_PORTS = _ports()


def free_port() -> int:
    """Return a port that nobody listens on."""
    for port in _NEXT_PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports never end")


class Process:
    """A process with its log in a file; ended by its pid."""

    def __init__(self, command: Sequence[str], *, log: Path, env: dict[str, str] | None = None):
        self.log = log
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=log.parent,
                env=env,
            )
        self.pid = self._popen.pid
        self._told = False  # a second SIGTERM ends a node at once

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def told(self) -> bool:
        """Whether it was told to end."""
        return self._told

    def said(self) -> str:
        """Return what the process has logged."""
        return self.log.read_text(errors="replace")

    def terminate(self) -> None:
        """Send SIGTERM, once, if it runs."""
        if self.alive and not self._told:
            self._told = True
            self._popen.terminate()

    def stop(self, *, within_s: float = 60.0) -> int:
        """End it with SIGTERM and return its exit status; SIGKILL where that does not help."""
        self.terminate()
        try:
            return self._popen.wait(within_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
            raise

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._popen.kill()
        self._popen.wait()


def node(module: str, *args: str, log: Path, env: dict[str, str] | None = None) -> Process:
    """Start `python -m module` from this checkout, without the environment's own settings."""
    inherited = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
    return Process(
        [sys.executable, "-m", module, *args],
        log=log,
        env=inherited | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | (env or {}),
    )


class NatsServer:
    """A nats-server with JetStream; it can be stopped and started again on the same port."""

    def __init__(self, folder: Path, *, config: str = "") -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._folder = folder
        self._config = config
        self._process: Process | None = None

    def start(self) -> None:
        """Start it and wait until it greets."""
        beside = str(Path(sys.executable).parent)
        binary = shutil.which("nats-server") or shutil.which("nats-server", path=beside)
        assert binary, "nats-server is neither on PATH nor beside this Python"
        store = str(self._folder / "store")
        command = [binary, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", store]
        if self._config:
            (self._folder / "nats.conf").write_text(self._config)
            command += ["-c", str(self._folder / "nats.conf")]
        self._process = Process(command, log=self._folder / "nats.log")
        wait_for(self._greets, within_s=START_S_MAX, what=f"nats-server on {self.port}")

    def _greets(self) -> bool:
        assert self._process is not None
        assert self._process.alive, self._process.said()
        if "Server is ready" not in self._process.said():
            return False
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as client:
                return client.recv(5) == b"INFO "
        except OSError:
            return False

    def kill(self) -> None:
        """End it with SIGKILL; its store stays."""
        if self._process is not None:
            self._process.log.write_text("")
            self._process.kill()
            self._process = None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """End it; its store stays."""
        if self._process is not None:
            self._process.log.write_text("")  # so that the next start's "ready" is its own
            self._process.stop()
            self._process = None


def freeze(pid: int) -> None:
    """Stop a process, and return once none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        stats = Path(f"/proc/{pid}/task").glob("*/stat")
        try:
            return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)
        except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            return False

    wait_for(stopped, within_s=5, what=f"{pid} to stand still")


def answers(url: str) -> bool:
    """Tell whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def wait_ready(process: Process, url: str) -> None:
    """Wait until a node's /readyz answers 200."""

    def ready() -> bool:
        assert process.alive, process.said()
        return answers(f"{url}/readyz")

    wait_for(ready, within_s=START_S_MAX, what=lambda: f"{url}/readyz\n{process.said()[-2000:]}")
