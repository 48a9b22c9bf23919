"""`headrace up` as its users start it, with simulated workers, until the end of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import free_port, node, wait_ready
from tests.waiting import wait_for

START_S_MAX = 60.0


@contextmanager
def serving(folder: Path, *args: str, configuration: str = "") -> Iterator[str]:
    """Run `headrace up` with what headrace.toml says; yield the URL that clients are given.

    Its data are in `folder / "data"`.
    """
    port = free_port()
    (folder / "headrace.toml").write_text(configuration)
    process = node(
        "headrace.cli",
        *("up", "--workers", "2", "--port", str(port), "--data-dir", str(folder / "data"), *args),
        log=folder / "up.log",
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: f"endpoint: {url}" in process.said(), within_s=START_S_MAX, what="up")
        wait_ready(process, url)
        yield url
        assert process.alive, process.said()[-4000:]
    finally:
        process.stop()
