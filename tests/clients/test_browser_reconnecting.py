"""A browser's EventSource whose server is killed in mid-stream comes again by itself."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from headrace.datadir import DataDir
from tests.clients.asking import MESSAGES, MODEL, says
from tests.clients.browser.chromium import Page, binary, page
from tests.clients.serving import serving
from tests.waiting import wait_for

SCRIPT = Path(__file__).parent / "browser" / "reconnecting.js"
PIECES = [f"word{k} " for k in range(60)]
KILLED_AFTER = 10


@pytest.mark.skipif(binary() is None, reason="Chromium is not installed (Debian: chromium)")
@pytest.mark.parametrize(
    ("form", "tier", "at_door"),
    [((), "gateway", True), (("--split",), "streamer", False), (("--split",), "streamer", True)],
    ids=["gateway", "streamer", "ingress"],
)
def test_an_event_source_left_alone_shows_every_token_once_though_its_server_is_killed(
    form: tuple[str, ...], tier: str, at_door: bool, tmp_path: Path
) -> None:
    ask = {"model": MODEL, "messages": MESSAGES, "stream": True}
    with (
        serving(tmp_path, *form) as url,
        httpx.Client(timeout=60, follow_redirects=True, verify=False) as client,
    ):
        chat = f"{url}/v1/chat/completions"
        streams_at = client.post(chat, json=ask | says("a")).url
        home = url if at_door else f"{streams_at.scheme}://{streams_at.netloc.decode()}"
        with (
            page(f"{home}/healthz", tmp_path) as shown,  # any page of the origin that is asked
            # Only now: a browser may take longer to start than the tokens take to come.
            client.stream("POST", chat, json=ask | says(*PIECES, itl_ms=200, ttft_ms=0)) as answer,
        ):
            assert answer.status_code == 200
            request = answer.headers["x-request-id"]
            shown.value(SCRIPT.read_text())
            shown.value(f"globalThis.seen = watch('/v1/streams/{request}'), true")
            wait_for(lambda: _count(shown) >= KILLED_AFTER, within_s=60, what="tokens")
            kill(tmp_path / "data", tier)
            assert _count(shown) < len(PIECES)
            assert shown.value("seen.over")
            seen = shown.value("seen")
    assert seen["pieces"] == PIECES
    assert seen["opened"] >= 2
    assert seen["lost"] >= 2  # when it was killed, and at the end
    assert seen["done"] == 1


def _count(shown: Page) -> int:
    return int(shown.value("seen.pieces.length"))


def kill(data_dir: Path, tier: str) -> None:
    """Kill the one process of a tier; `headrace up` brings it back."""
    [process] = [each for each in DataDir(data_dir).running().processes if each.tier == tier]
    os.kill(process.pid, signal.SIGKILL)
