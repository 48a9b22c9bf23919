"""The data dir of `headrace up`: who owns it, what runs from it, and what was left behind."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec
import psutil

LEFTOVER_S: Final = 3.0
"""What a dead `up` left has had its SIGTERM already, from the kernel."""
CLOCK_S: Final = 2.0
"""The kernel counts start times from boot; the wall clock may have been set since."""

ProcessState = Literal["starting", "ready", "draining", "dead"]


class DataDirInUse(Exception):
    """Another `headrace up` runs from this data dir."""


class NothingRuns(Exception):
    """No `headrace up` runs from this data dir."""


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process. A pid alone may have been given to somebody else; with its start it is safe."""

    name: str
    tier: str
    pid: int
    started_s: float
    state: ProcessState
    admin_url: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What run.json says. Clients send their requests to any of `endpoints`, `endpoint` is the
    first; `streamers` are the URLs that they are sent on to where the tiers are apart."""

    up_pid: int
    up_started_s: float
    endpoint: str
    nats_url: str
    processes: tuple[ProcessRecord, ...] = ()
    endpoints: tuple[str, ...] = ()
    streamers: tuple[str, ...] = ()


def started_s(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch; None when it is gone."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return float(process.create_time())
    except psutil.Error:
        return None


def is_alive(pid: int, since_s: float) -> bool:
    """Tell whether the process of this pid is the one that started then."""
    found = started_s(pid)
    return found is not None and abs(found - since_s) <= CLOCK_S


class DataDir:
    """A directory that only its owner may read, with the run file in it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._run_file = self.path / "run.json"

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Own the directory, making it if need be, for the length of a block.

        Raises DataDirInUse. The kernel gives the lock back however the owner ends.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataDirInUse(f"another headrace up runs from {self.path}") from None
            yield
        finally:
            os.close(lock)

    def write(self, record: RunRecord) -> None:
        """Replace the run file at once: a reader sees the old one or the new one."""
        self.write_private("run.json", msgspec.json.encode(record))

    def write_private(self, name: str, content: bytes) -> Path:
        """Replace a file that only the owner may read, at once; return its path."""
        path = self.path / name
        fresh = self.path / f".{name}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        fresh.replace(path)
        return path

    def forget(self) -> None:
        """Remove the run file: nothing runs any more."""
        self._run_file.unlink(missing_ok=True)

    def _read(self) -> RunRecord | None:
        try:
            return msgspec.json.decode(self._run_file.read_bytes(), type=RunRecord)
        except (OSError, msgspec.MsgspecError):
            return None

    def running(self) -> RunRecord:
        """Return what runs now; a process that has just died is dead. Raises NothingRuns."""
        record = self._read()
        if record is None or not is_alive(record.up_pid, record.up_started_s):
            raise NothingRuns(f"no headrace up runs from {self.path}; --data-dir names another one")
        processes = tuple(
            process
            if is_alive(process.pid, process.started_s)
            else msgspec.structs.replace(process, state="dead")
            for process in record.processes
        )
        return msgspec.structs.replace(record, processes=processes)

    def end_leftovers(self) -> list[str]:
        """End what a killed `up` has left running; return the names. The caller owns the dir."""
        record = self._read()
        if record is None:
            return []
        found = {
            process: owner.name for owner in record.processes for process in _session_of(owner)
        }
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGTERM)
        _, stubborn = psutil.wait_procs(list(found), timeout=LEFTOVER_S)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(stubborn, timeout=LEFTOVER_S)
        self.forget()
        return sorted(set(found.values()))


def _session_of(record: ProcessRecord) -> list[psutil.Process]:
    """Return the living processes of the session that the recorded process led.

    A session's number is not given to a new process while a member lives. So either the leader
    lives and is the recorded one, or it is gone and the members are its children.
    """
    if not record.pid:  # not started yet; session 0 is the kernel's, and what came in from outside
        return []
    leader = started_s(record.pid)
    if leader is not None and abs(leader - record.started_s) > CLOCK_S:
        return []
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            young = process.create_time() >= record.started_s - CLOCK_S
            if young and os.getsid(process.pid) == record.pid:
                members.append(process)
    return members
