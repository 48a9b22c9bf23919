"""Facts about a node's life, seen from outside: real processes and real signals."""

import asyncio
import signal
import subprocess
import sys
import textwrap

import pytest

from headrace import lifecycle


def node(body: str) -> "subprocess.Popen[str]":
    script = "import asyncio\nfrom headrace import lifecycle\n" + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_the_first_signal_stops_a_node_with_status_0() -> None:
    with node(
        """
        async def main(stop):
            print("up", flush=True)
            await stop.wait()
            print("drained", flush=True)
        raise SystemExit(lifecycle.run(main))
        """
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "drained\n"
        assert process.wait(30) == 0


def test_the_second_signal_ends_a_node_at_once() -> None:
    with node(
        """
        async def main(stop):
            print("up", flush=True)
            await stop.wait()
            print("draining", flush=True)
            await asyncio.Event().wait()
        raise SystemExit(lifecycle.run(main, at_once=lambda: print("at once", flush=True)))
        """
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "at once\n"
        assert process.wait(30) == 130


def test_the_death_of_a_task_ends_the_node_with_status_1_and_its_name() -> None:
    with node(
        """
        async def heartbeat():
            raise RuntimeError("no\\npulse")
        async def main(stop):
            lifecycle.log_to_stdout("worker-1")
            async with lifecycle.running_tasks() as tasks:
                tasks.start("heartbeat", heartbeat())
                await stop.wait()
        raise SystemExit(lifecycle.run(main))
        """
    ) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    failed, ends = output.splitlines()
    assert "Z ERROR worker-1 headrace.lifecycle: task heartbeat failed\\nTraceback" in failed
    assert ends.endswith("CRITICAL worker-1 headrace.lifecycle: ends: RuntimeError: no\\npulse")


def test_a_task_that_returns_ends_the_node() -> None:
    async def brief() -> None:
        return

    async def scenario() -> None:
        async with asyncio.timeout(30), lifecycle.running_tasks() as tasks:
            tasks.start("brief", brief())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    assert caught.group_contains(lifecycle.TaskEnded, match="brief")


def test_tasks_are_cancelled_when_the_block_ends() -> None:
    async def scenario() -> bool:
        async with asyncio.timeout(30), lifecycle.running_tasks() as tasks:
            task = tasks.start("long", asyncio.Event().wait())
        return task.cancelled()

    assert asyncio.run(scenario())
