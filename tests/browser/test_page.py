"""A page in a real browser: plain `WebSocket` and `fetch` both show an answer token by token."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.browser.chromium import binary, page
from tests.pipeline.conftest import Mode, System, system

__all__ = ["system"]  # the fixture

pytestmark = pytest.mark.slow

PIECES = [f"word{k} " for k in range(30)]
SPREAD_MS = 500.0  # they are made 40 ms apart: all at once would be a buffer somewhere


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def mode() -> Mode:
    """The form of the system: a gateway."""
    return "gateway"


@pytest.fixture
def pages() -> Iterator[str]:
    """A server of this folder's pages, on an origin of its own."""
    handler = functools.partial(_Quiet, directory=str(Path(__file__).parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(binary() is None, reason="Chromium is not installed (Debian: chromium)")
def test_a_page_of_another_origin_shows_both_transports_token_by_token(
    system: System,
    pages: str,
    tmp_path: Path,
) -> None:
    with page(
        f"{pages}/page.html?api={quote(system.url)}&sockets={quote(system.socket_end.url)}",
        tmp_path,
    ) as shown:
        outcome = shown.value("both")
        texts = [
            shown.value(f"document.getElementById('{name}').textContent")
            for name in ("socket", "fetch")
        ]
    assert "failed" not in outcome, outcome
    assert outcome["code"] == 1000
    assert outcome["request"].startswith("req_"), "the header is not exposed to the page"
    for pieces in outcome["seen"].values():
        assert [piece["text"] for piece in pieces] == PIECES
        assert pieces[-1]["ms"] - pieces[0]["ms"] > SPREAD_MS
    assert texts == ["".join(PIECES)] * 2
