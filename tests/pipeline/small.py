"""The smallest system, for tests of what a configuration makes of it: a gateway and a worker."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.pipeline.conftest import _apply, page
from tests.servers import NatsServer, Process, free_port, node, wait_ready
from tests.waiting import wait_for

AT_DEBUG = """
import functools, logging, runpy, sys
from headrace import lifecycle
lifecycle.log_to_stdout = functools.partial(lifecycle.log_to_stdout, level=logging.DEBUG)
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Small:
    """Where it serves, and the folder with the logs of all processes."""

    url: str
    folder: Path

    def logs(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.folder.glob("*.log"))

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, verify=False)


def small(folder: Path, *flags: str, toml: str = "", debug: bool = False) -> Iterator[Small]:
    """Run it; the gateway has `flags`, both read `toml`, and log at debug level where wanted."""
    config = folder / "small.toml"
    config.write_text(toml)

    def start(name: str, *args: str) -> Process:
        common = ("--nats-url", nats.url, "--config", str(config), *args)
        log = folder / f"{name}.log"
        if not debug:
            return node(name, *common, log=log)
        run = [sys.executable, "-c", AT_DEBUG, name, *common]
        return Process(run, log=log)

    with ExitStack() as cleanup:
        nats = NatsServer(folder)
        cleanup.callback(nats.stop)
        nats.start()
        _apply(nats.url)
        port, admins = free_port(), (free_port(), free_port())
        door = start("gateway", "--port", str(port), "--admin-port", str(admins[0]), *flags)
        cleanup.callback(door.stop)
        worker = start("workers", "--admin-port", str(admins[1]))
        cleanup.callback(worker.stop)
        for process, admin in ((door, admins[0]), (worker, admins[1])):
            wait_ready(process, f"http://127.0.0.1:{admin}")
        readyz = f"http://127.0.0.1:{admins[0]}/readyz"
        wait_for(lambda: "sim" in page(readyz), within_s=15, what="the model")
        yield Small(f"http://127.0.0.1:{port}", folder)
