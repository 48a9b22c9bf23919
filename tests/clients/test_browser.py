"""A page in a real browser: plain `WebSocket`, `fetch` and `EventSource` show each token as it
comes."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.clients.browser.chromium import binary, page

FOLDER = Path(__file__).parent / "browser"
PIECES = [f"word{k} " for k in range(30)]
SPREAD_MS = 500.0  # they are made in six seconds: all at once would be a buffer somewhere


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[str]:
    """A server of a folder's pages, on an origin of its own."""
    handler = functools.partial(_Quiet, directory=str(FOLDER))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(binary() is None, reason="Chromium is not installed (Debian: chromium)")
def test_a_page_of_another_origin_shows_every_transport_token_by_token(
    url: str,
    pages: str,
    tmp_path: Path,
) -> None:
    api = quote(url)
    with page(f"{pages}/page.html?api={api}&sockets={api}", tmp_path) as shown:
        outcome = shown.value("all")
        texts = [
            shown.value(f"document.getElementById('{name}').textContent")
            for name in ("socket", "fetch", "events")
        ]
    assert "failed" not in outcome, outcome
    assert outcome["code"] == 1000
    assert outcome["request"].startswith("req_"), "the header is not exposed to the page"
    for transport, pieces in outcome["seen"].items():
        assert [piece["text"] for piece in pieces] == PIECES
        if transport == "events":
            continue  # it comes later, and what was before it comes at once
        assert pieces[-1]["ms"] - pieces[0]["ms"] > SPREAD_MS
    assert texts == ["".join(PIECES)] * 3
