"""Signing keys that rotate: a file and a URL, read again when that may help."""

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.tenant_settings import JwtSettings
from ingress import jwks
from ingress.auth import Caller, Gate
from ingress.jwks import KeySet
from ingress.jwt import Verifier
from schemas.errors import InvalidApiKey
from tests.signing import EC_KEY, RSA_KEY, jwk, signed
from tests.waiting import until

CLAIMS = {"tenant": "acme", "exp": int(time.time()) + 24 * 3600}
OLD = signed(CLAIMS, RSA_KEY, "RS256", kid="old")
NEW = signed(CLAIMS, EC_KEY, "ES256", kid="new")
OLD_SET = {"keys": [jwk(RSA_KEY, "old")]}
NEW_SET = {"keys": [jwk(EC_KEY, "new")]}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """A gate whose tokens are verified by a key set."""

    def __init__(self, settings: JwtSettings) -> None:
        self.clock = Clock()
        self.verifier = Verifier(settings)
        self.keys = KeySet(settings, self.verifier, clock=self.clock)
        known = [("x", hashlib.sha256(b"k").hexdigest())]
        self.gate = Gate(known, verifier=self.verifier, refresh=self.keys.refresh)

    async def believes(self, token: bytes) -> bool:
        try:
            headers = [(b"authorization", b"Bearer " + token)]
            return await self.gate.recognise(headers) == Caller("acme")
        except InvalidApiKey:
            return False


def test_a_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks, "FILE_S", 0.01)
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(OLD_SET))

    async def run() -> None:
        rig = Rig(JwtSettings(jwks_file=str(file)))
        await rig.keys.refresh()
        assert await rig.believes(OLD)
        assert not await rig.believes(NEW)
        following = asyncio.create_task(rig.keys.follow())
        file.write_text(json.dumps(NEW_SET))
        await until(lambda: rig.believes(NEW))
        assert not await rig.believes(OLD)
        file.write_text("{")  # half written: the last good set stays
        await asyncio.to_thread(file.unlink)
        assert await rig.believes(NEW)
        following.cancel()

    asyncio.run(run())


class Provider:
    """An identity provider's page of keys."""

    def __init__(self) -> None:
        self.content: Any = OLD_SET
        self.redirect_to: str | None = None
        self.raw: bytes | None = None  # in place of an answer
        self.whole = threading.Event()  # until then blanks drip, and no end comes
        self.whole.set()
        self.asked = 0
        self.url = ""


@contextmanager
def provider() -> Iterator[Provider]:
    page = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page.asked += 1
            if page.raw is not None:
                self.wfile.write(page.raw)
                return
            content = json.dumps(page.content).encode()
            self.send_response(302 if page.redirect_to else 200)
            if page.redirect_to:
                self.send_header("Location", page.redirect_to)
            if page.whole.is_set():
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(ConnectionError):
                while not page.whole.wait(0.01):
                    self.wfile.write(b" ")
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    page.url = f"http://127.0.0.1:{server.server_address[1]}/keys"
    try:
        yield page
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_token_of_a_new_key_is_believed_at_once() -> None:
    async def run(page: Provider) -> None:
        rig = Rig(JwtSettings(jwks_url=page.url))
        await rig.keys.refresh()
        assert await rig.believes(OLD)
        page.content = {"keys": OLD_SET["keys"] + NEW_SET["keys"]}
        rig.clock.now_s += jwks.RETRY_S
        assert await rig.believes(NEW)
        assert await rig.believes(OLD)
        assert page.asked == 2

    with provider() as page:
        asyncio.run(run(page))


def test_tokens_of_a_new_key_that_come_together_are_all_believed() -> None:
    async def run(page: Provider) -> None:
        rig = Rig(JwtSettings(jwks_url=page.url))
        await rig.keys.refresh()
        page.content = NEW_SET
        rig.clock.now_s += jwks.RETRY_S
        believed = await asyncio.gather(*(rig.believes(NEW) for _ in range(3)))
        assert believed == [True, True, True]
        assert page.asked == 2

    with provider() as page:
        asyncio.run(run(page))


def test_tokens_of_unknown_keys_do_not_ask_the_provider_each_time() -> None:
    async def run(page: Provider) -> None:
        rig = Rig(JwtSettings(jwks_url=page.url))
        await rig.keys.refresh()
        rig.clock.now_s += jwks.RETRY_S
        believed = await asyncio.gather(*(rig.believes(NEW) for _ in range(50)))
        assert not any(believed)
        assert page.asked == 2

    with provider() as page:
        asyncio.run(run(page))


def test_a_token_of_a_known_key_asks_nobody() -> None:
    async def run(page: Provider) -> None:
        rig = Rig(JwtSettings(jwks_url=page.url))
        await rig.keys.refresh()
        rig.clock.now_s += 1000
        assert await rig.believes(OLD)
        assert not await rig.believes(OLD[:-8])
        assert page.asked == 1

    with provider() as page:
        asyncio.run(run(page))


def test_a_provider_cannot_send_us_elsewhere() -> None:
    async def run(page: Provider, other: Provider) -> None:
        page.redirect_to = other.url
        rig = Rig(JwtSettings(jwks_url=page.url))
        assert not await rig.keys.refresh()
        assert not await rig.believes(OLD)
        assert other.asked == 0

    with provider() as page, provider() as other:
        asyncio.run(run(page, other))


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
    ],
    ids=["no HTTP", "cut off", "a header too long"],
)
def test_a_provider_whose_answer_is_no_http_ends_nothing(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "RETRY_S", 0.01)

    async def run(page: Provider) -> None:
        page.raw = raw
        rig = Rig(JwtSettings(jwks_url=page.url))
        assert not await rig.keys.refresh()
        following = asyncio.create_task(rig.keys.follow())
        await until(lambda: following.done() or page.asked >= 3)
        page.raw = None
        await until(lambda: rig.believes(OLD))
        assert not following.done()
        following.cancel()

    with provider() as page:
        asyncio.run(run(page))


def test_a_provider_whose_answer_has_no_end_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(page: Provider) -> None:
        rig = Rig(JwtSettings(jwks_url=page.url))
        await rig.keys.refresh()
        monkeypatch.setattr(jwks, "TIMEOUT_S", 0.5)
        rig.clock.now_s += jwks.RETRY_S
        page.whole.clear()
        try:
            async with asyncio.timeout(30):
                assert not await rig.believes(NEW)
                assert await rig.believes(OLD)
        finally:
            page.whole.set()

    with provider() as page:
        asyncio.run(run(page))
