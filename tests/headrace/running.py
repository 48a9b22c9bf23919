"""A running `headrace up`, and other commands of the CLI."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import until


class Up:
    """A running `headrace up`: its process and all it has printed."""

    def __init__(self, process: asyncio.subprocess.Process, data_dir: Path) -> None:
        self.process = process
        self.data_dir = data_dir
        self.lines: list[str] = []

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())

    def line(self, start: str) -> str:
        return next((line for line in self.lines if line.startswith(start)), "")

    def ps(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.data_dir / "run.json").read_bytes())
        return {process["name"]: process for process in found["processes"]}

    def ready(self, name: str) -> bool:
        return bool(self.ps()[name]["state"] == "ready")


def headrace(*args: object) -> list[str]:
    return [sys.executable, "-m", "headrace.cli", *map(str, args)]


@asynccontextmanager
async def up(tmp_path: Path, environ: dict[str, str], *flags: object) -> AsyncIterator[Up]:
    data_dir = tmp_path / "data"
    process = await asyncio.create_subprocess_exec(
        *headrace("up", "--data-dir", data_dir, "--port", 0, *flags),
        env=environ,
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    system = Up(process, data_dir)
    reading = asyncio.create_task(system.read())
    try:
        await until(lambda: system.line("curl") or process.returncode is not None, within_s=60)
        yield system
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()
            await reading


def run(environ: dict[str, str], cwd: Path, *args: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        headrace(*args), env=environ, cwd=cwd, capture_output=True, text=True, timeout=120
    )


def listened_on(environ: dict[str, str]) -> set[int]:
    """Return the ports that processes of this environment listen on, whoever started them."""
    ports = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PYTHONPATH") == environ["PYTHONPATH"]:
                sockets = process.net_connections("tcp")
                ports |= {each.laddr.port for each in sockets if each.status == "LISTEN"}
    return ports
