"""Facts about the data dir: one owner, a run file that can be trusted, and no leftovers."""

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace.datadir import (
    DataDir,
    DataDirInUse,
    NothingRuns,
    ProcessRecord,
    RunRecord,
    _session_of,
    is_alive,
    started_s,
)
from tests.waiting import until

STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
signal.pause()
"""


def record_of(pid: int, since_s: float, *, up_pid: int = 0) -> RunRecord:
    return RunRecord(
        up_pid=up_pid or os.getpid(),
        up_started_s=started_s(up_pid or os.getpid()) or 0.0,
        endpoint="http://127.0.0.1:1",
        nats_url="nats://127.0.0.1:2",
        processes=(
            ProcessRecord(
                name="worker-1",
                tier="worker",
                pid=pid,
                started_s=since_s,
                state="ready",
                admin_url="http://127.0.0.1:3",
            ),
        ),
    )


def child(script: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_a_data_dir_has_one_owner_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "data"
    with DataDir(path).claim():
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with pytest.raises(DataDirInUse, match="another headrace up"), DataDir(path).claim():
            pass
    with DataDir(path).claim():
        pass


def test_the_run_file_says_what_runs_while_up_lives(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path)
    with pytest.raises(NothingRuns, match="no headrace up runs"):
        data_dir.running()
    me = started_s(os.getpid()) or 0.0
    data_dir.write(record_of(os.getpid(), me))
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600
    assert data_dir.running().processes[0].state == "ready"
    data_dir.write(record_of(os.getpid(), me - 100))
    assert data_dir.running().processes[0].state == "dead"
    data_dir.forget()
    with pytest.raises(NothingRuns):
        data_dir.running()


def test_a_run_file_of_a_dead_up_is_nothing(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    data_dir = DataDir(tmp_path)
    data_dir.write(record_of(os.getpid(), 0.0, up_pid=gone.pid))
    with pytest.raises(NothingRuns):
        data_dir.running()


@pytest.mark.slow
def test_leftovers_are_ended_even_when_they_ignore_sigterm(tmp_path: Path) -> None:
    with child(STUBBORN) as process:
        data_dir = DataDir(tmp_path)
        data_dir.write(record_of(process.pid, started_s(process.pid) or 0.0))
        assert data_dir.end_leftovers() == ["worker-1"]
        assert started_s(process.pid) is None
    assert data_dir.end_leftovers() == []


def test_leftovers_whose_leader_is_gone_are_ended(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('up', flush=True); print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        orphan = int(process.stdout.readline())
        since_s = started_s(process.pid) or 0.0
        process.kill()
        process.wait()
        assert psutil.pid_exists(orphan)
        data_dir = DataDir(tmp_path)
        data_dir.write(record_of(process.pid, since_s))
        assert data_dir.end_leftovers() == ["worker-1"]
        asyncio.run(until(lambda: started_s(orphan) is None))


def test_a_pid_that_was_given_to_somebody_else_is_left_alone(tmp_path: Path) -> None:
    with child(STUBBORN) as process:
        since_s = (started_s(process.pid) or 0.0) - 100
        data_dir = DataDir(tmp_path)
        data_dir.write(record_of(process.pid, since_s))
        assert data_dir.end_leftovers() == []
        assert is_alive(process.pid, since_s + 100)
        process.kill()


def test_a_process_that_was_not_started_yet_leaves_nothing_to_end() -> None:
    [unstarted] = record_of(0, 0.0).processes
    assert _session_of(unstarted) == []
