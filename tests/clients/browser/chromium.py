"""A headless Chromium, spoken to by its DevTools protocol over a WebSocket."""

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

from tests.servers import Process
from tests.waiting import wait_for

FLAGS = (
    "--headless",
    "--no-sandbox",  # it refuses to run as root with it
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
START_S_MAX = 60.0
ANSWER_S_MAX = 180.0


def binary() -> str | None:
    """Return where Chromium is, None where it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._events: set[str] = set()

    def open(self, url: str) -> None:
        """Go to a URL and wait until it is loaded."""
        self.command("Page.enable")
        self.command("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._next()

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Give a command and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (message := self._next()).get("id") != number:
            pass
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=ANSWER_S_MAX))
        self._events.add(message.get("method", ""))
        return message

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives; a promise is waited for."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@contextmanager
def page(url: str, folder: Path) -> Iterator[Page]:
    """Run a browser with an empty profile in `folder`, and open a page in it."""
    found = binary()
    assert found is not None
    profile = folder / "profile"
    profile.mkdir()
    command = [found, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = Process(command, log=folder / "chromium.log")
    try:
        port_file = profile / "DevToolsActivePort"

        def ready() -> bool:
            assert process.alive, process.said()
            return port_file.is_file() and "\n" in port_file.read_text()

        wait_for(ready, within_s=START_S_MAX, what="Chromium's port")
        port = port_file.read_text().split("\n", 1)[0]
        tab = httpx.put(f"http://127.0.0.1:{port}/json/new?about:blank", timeout=60).json()
        # A browser with much to do hears a ping late: it is not asked for any.
        options: dict[str, Any] = {"open_timeout": 60, "ping_interval": None}
        options |= {"max_size": None, "proxy": None}
        with connect(tab["webSocketDebuggerUrl"], **options) as socket:
            shown = Page(socket)
            shown.open(url)
            yield shown
    finally:
        process.stop()
