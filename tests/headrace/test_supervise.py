"""Facts about supervision, with small real processes."""

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop

from headrace.datadir import ProcessRecord, started_s
from headrace.supervise import Child, Command, Died, Supervisor, supervising
from tests.servers import free_port
from tests.waiting import until

SERVES = """
import http.server, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if STATE == "ready" else 503)
        self.end_headers()
        self.wfile.write(b'{"state": "%s"}' % STATE.encode())
    def log_message(self, *_): pass
STATE = sys.argv[2]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BREAKS_OFF = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
for count in range(1, 1000):
    connection, _ = listener.accept()
    connection.recv(65536)
    connection.sendall(sys.argv[2].encode().decode("unicode_escape").encode())
    connection.close()
    if count == 3:
        open(sys.argv[3], "w").close()
"""
WAITS = "import signal; signal.pause()"
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
IGNORES += "while True: signal.pause()"
ENDS = "raise SystemExit(3)"
FORKS = (
    "import subprocess, sys, signal\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    "open(sys.argv[2], 'w').write(str(child.pid)); signal.pause()"
)


def command(
    script: str, *extra: str, name: str = "one", tier: str = "worker", grace_s: float = 5.0
) -> Command:
    return Command(
        name=name,
        tier=tier,
        argv=lambda port: [sys.executable, "-c", script, str(port), *extra],
        environ=dict(os.environ),
        admin_port=free_port,
        grace_s=grace_s,
    )


@asynccontextmanager
async def supervisor(
    told: list[Sequence[ProcessRecord]] | None = None,
) -> AsyncIterator[Supervisor]:
    async with (
        asyncio.timeout(90),
        supervising(
            stop_order=["gateway", "worker"],
            on_change=lambda records: told.append(records) if told is not None else None,
        ) as found,
    ):
        yield found


def pid_of(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_brought_back_and_the_others_are_not_touched(number: int) -> None:
    async def scenario() -> None:
        async with supervisor() as system:
            one = await system.start(command(WAITS))
            two = await system.start(command(WAITS, name="two"))
            first, other = pid_of(one), pid_of(two)
            os.kill(first, number)
            await until(lambda: pid_of(one) != first)
            assert pid_of(two) == other
            assert os.getsid(pid_of(one)) == pid_of(one)
        assert started_s(pid_of(one)) is None
        assert started_s(other) is None

    uvloop.run(scenario())


def test_states_are_read_from_the_process_and_told() -> None:
    async def scenario() -> None:
        told: list[Sequence[ProcessRecord]] = []
        async with supervisor(told) as system:
            ready = await system.start(command(SERVES, "ready"))
            drains = await system.start(command(SERVES, "draining", name="two"))
            await system.ready(ready)
            await until(lambda: (ready.state, drains.state) == ("ready", "draining"))
            [one, two] = told[-1]
            assert (one.name, one.tier, one.pid) == ("one", "worker", pid_of(ready))
            assert (one.state, two.state) == ("ready", "draining")
            assert one.admin_url == ready.admin_url
            os.kill(pid_of(ready), signal.SIGKILL)
            await until(lambda: pid_of(ready) != one.pid)
            await system.ready(ready, deaths_max=1)
            again = [records[0].state for records in told if records[0].pid == pid_of(ready)]
            assert again[0] == "starting"
        assert [record.state for record in told[-1]] == ["dead", "dead"]

    uvloop.run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        r"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{",
        r"HTTP/1.1 503 No\r\nContent-Length: 18\r\n\r\n{",
        r"INFO {}\r\n",
    ],
)
def test_an_answer_that_breaks_off_does_not_end_the_supervisor(answer: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervisor() as system:
            child = await system.start(command(BREAKS_OFF, answer, str(tmp_path / "asked")))
            await until((tmp_path / "asked").exists)
            assert child.state == "starting"

    uvloop.run(scenario())


def test_what_ends_before_it_is_ready_is_reported() -> None:
    async def scenario() -> None:
        async with supervisor() as system:
            with pytest.raises(Died, match="one ended before it was ready"):
                await system.ready(await system.start(command(ENDS)))

    uvloop.run(scenario())


def test_tiers_are_stopped_in_order() -> None:
    async def scenario() -> None:
        told: list[Sequence[ProcessRecord]] = []
        async with supervisor(told) as system:
            await system.start(command(WAITS, name="w", tier="worker"))
            await system.start(command(WAITS, name="g", tier="gateway"))
        states = [{record.name: record.state for record in records} for records in told]
        assert {"w": "starting", "g": "dead"} in states
        assert {"w": "dead", "g": "starting"} not in states

    uvloop.run(scenario())


def test_what_outlasts_its_grace_is_killed() -> None:
    async def scenario() -> None:
        async with supervisor() as system:
            child = await system.start(command(IGNORES, grace_s=0.0))
        assert started_s(pid_of(child)) is None

    uvloop.run(scenario())


def test_what_a_dead_process_has_started_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    async def scenario() -> None:
        async with supervisor() as system:
            child = await system.start(command(FORKS, str(note)))
            grandchild = int(await until(lambda: note.exists() and note.read_text()))
            os.kill(pid_of(child), signal.SIGKILL)
            await until(lambda: started_s(grandchild) is None)

    uvloop.run(scenario())


def test_a_process_that_waits_for_its_restart_does_not_delay_the_stop() -> None:
    async def scenario() -> None:
        async with supervisor() as system:
            child = await system.start(command(ENDS))
            await until(lambda: child.restarts.deaths >= 3)
        assert child.dead

    uvloop.run(scenario())


def test_a_program_that_is_away_for_a_moment_is_started_when_it_is_back(tmp_path: Path) -> None:
    program, aside = tmp_path / "program", tmp_path / "aside"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)

    async def scenario() -> None:
        async with supervisor() as system:
            one = await system.start(
                dataclasses.replace(command(WAITS), argv=lambda _: [str(program)])
            )
            first = pid_of(one)
            program.rename(aside)  # as while a package is being installed anew
            os.kill(first, signal.SIGKILL)
            await until(lambda: one.restarts.deaths >= 2)
            aside.rename(program)
            await until(lambda: pid_of(one) != first)

    uvloop.run(scenario())


def test_a_program_that_is_not_there_is_an_error_of_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        nothing = dataclasses.replace(command(WAITS), argv=lambda _: [str(tmp_path / "nothing")])
        async with supervisor() as system:
            await system.start(nothing)

    with pytest.raises(ExceptionGroup) as caught:
        uvloop.run(scenario())
    assert caught.group_contains(FileNotFoundError)


def test_once_gives_status_and_output() -> None:
    async def scenario() -> None:
        async with supervisor() as system:
            argv = [sys.executable, "-c", "print('sim'); raise SystemExit(4)"]
            assert await system.once(argv, dict(os.environ)) == (4, "sim\n")

    uvloop.run(scenario())


def test_once_leaves_nothing_when_it_is_cancelled(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"import os, signal; open({str(note)!r}, 'w').write(str(os.getpid())); signal.pause()"

    async def scenario() -> None:
        async with supervisor() as system:
            work = asyncio.create_task(system.once([sys.executable, "-c", script], os.environ))
            pid = int(await until(lambda: note.exists() and note.read_text()))
            work.cancel()
            await asyncio.wait([work])
            assert started_s(pid) is None

    uvloop.run(scenario())


def test_once_leaves_nothing_when_it_is_cancelled_while_it_starts() -> None:
    async def scenario() -> None:
        async with supervisor() as system:
            before = psutil.Process().children()
            work = asyncio.create_task(system.once(["sleep", "60"], os.environ))
            await asyncio.sleep(0)
            work.cancel()
            await asyncio.wait([work])
            assert work.cancelled()
            assert psutil.Process().children() == before

    uvloop.run(scenario())


def test_children_end_when_the_supervisor_is_killed() -> None:
    script = f"""
import asyncio, os, sys
sys.path.insert(0, {os.getcwd()!r})
from headrace.supervise import Command, supervising
async def main():
    async with supervising(stop_order=[], on_change=lambda _: None) as system:
        child = await system.start(Command("one", "worker",
            lambda _: [sys.executable, "-c", {WAITS!r}], dict(os.environ), lambda: 1, 1.0))
        print(child.process.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""

    async def scenario() -> None:
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        child = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        await until(lambda: started_s(child) is None)

    uvloop.run(scenario())
