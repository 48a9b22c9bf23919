"""Keys and tokens that are shown in every way, right and wrong: none opens what it should not, and
no part of any is in a log, a metric or an answer of any process."""

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.ingress.test_jwt import ATTACKS, CLAIMS
from tests.pipeline.asking import CHAT, chat
from tests.pipeline.conftest import Mode, Node, page
from tests.pipeline.house import KEYS, House, open_house
from tests.signing import signed
from tests.talk import talking

pytestmark = pytest.mark.slow

PART = 8
HEADER_BYTES_MAX = 8000
"""A handshake's header is a line of 8,192 bytes at most."""
KEY = KEYS["acme"]
SECRET_PART = KEY.rpartition("-")[2]
GOOD_TOKEN = signed(CLAIMS).decode()
TOKENS = {
    kind: token
    for kind, (_, token) in ATTACKS.items()
    if "issuer" not in kind and kind != "an audience nobody named"  # this house names no issuer
}
BODY = json.dumps(chat(max_tokens=1)).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secrets")


@pytest.fixture(scope="module")
def house(mode: Mode, folder: Path) -> Iterator[House]:
    (folder / mode).mkdir()
    with open_house(mode, folder / mode) as found:
        yield found


def parts(text: str) -> set[str]:
    return {text[at : at + PART] for at in range(len(text) - PART + 1)}


def asked(each: Node, *headers: bytes, query: str = "", body: bytes = BODY) -> str:
    """Send a POST whose headers are these bytes, and return the whole answer."""
    port = int(each.url.rpartition(":")[2])
    head = f"POST {CHAT}{query} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    size = b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head + b"".join(header + b"\r\n" for header in headers) + size + body)
        said = b""
        with contextlib.suppress(ConnectionResetError):  # behind a 400, what was sent may be unread
            while part := connection.recv(65536):
                said += part
    return said.decode("latin-1")


def bearer(token: bytes) -> bytes:
    return b"Authorization: Bearer " + token


def wrong_headers(key: bytes) -> list[list[bytes]]:
    return [
        [b"Authorization: " + key],
        [b"Authorization: Basic " + key],
        [b"Authorization: Basic " + base64.b64encode(b"user:" + key)],
        [bearer(key), bearer(key)],
        [bearer(key + b" " + key)],
        [bearer(key * 200)],
        [bearer(key + "é".encode())],
        [bearer(b"\xff" + key)],
        [bearer(key[:-1])],
        [b"X-Api-Key: " + key],
        [b"Api-Key: " + key],
        [b"Cookie: key=" + key],
        [b"Sec-WebSocket-Protocol: " + key],
    ]


def malformed(key: bytes) -> list[list[bytes]]:
    return [
        [b"Authorization : Bearer " + key],
        [b"Authorization: Bearer \0" + key],
        [b"Authorization: Bearer " + key + b"\rX: y"],
        [b"Bearer " + key],
        [bearer(key * 2000)],
    ]


async def on_a_socket(url: str, first: Any, path: str = CHAT, **more: Any) -> tuple[str, int]:
    """Open a socket, say something, and return all that came, and the close code or status."""
    try:
        async with talking(url, path, **more) as talk:
            if first is not None:
                with contextlib.suppress(ConnectionClosed):  # the headers were enough
                    await talk.say(first)
            code = await talk.end()
            return json.dumps(talk.nameless) + str(talk.closed), code
    except InvalidStatus as refused:
        response = refused.response
        return (response.body or b"").decode() + str(response.headers), response.status_code


def sockets(house: House, key: str) -> list[tuple[str, int]]:
    """Show a key to a socket in every way that is not one."""
    url = (house.streamers or house.doors)[0].url
    ways: list[tuple[Any, str, dict[str, Any]]] = [
        (chat(), f"{CHAT}?key={key}&token={key}&api_key={key}", {}),
        (chat(), CHAT, {"subprotocols": ["realtime", f"openai-insecure-api-key.{key}"]}),
        (chat(), CHAT, {"additional_headers": [("Authorization", f"Bearer {key}")] * 2}),
        (None, CHAT, {"additional_headers": {"Authorization": f"Basic {key}"}}),
        (None, CHAT, {"additional_headers": {"Authorization": f"Bearer {key}x"}}),
        ({"type": "auth", "key": f"{key}x"}, CHAT, {}),
        ({"type": "auth", "key": key * 200}, CHAT, {}),
        ({"type": "auth", "key": f"{key}é"}, CHAT, {}),
        ({"type": "auth", "key": [key]}, CHAT, {}),
        ({"type": "auth", "token": key}, CHAT, {}),
        (f'{{"type":"auth","key":"{key}"', CHAT, {}),
        (key, CHAT, {}),
        ({"type": key}, "/v1/responses", {}),
    ]

    async def run() -> list[tuple[str, int]]:
        return [await on_a_socket(url, first, path, **more) for first, path, more in ways]

    return asyncio.run(run())


def test_no_part_of_a_key_is_in_any_log_metric_or_answer(
    house: House, mode: Mode, folder: Path
) -> None:
    said = []
    for key in (KEY, GOOD_TOKEN):
        raw = key.encode()
        for door in house.doors:
            accepted = asked(door, bearer(raw))
            assert accepted.startswith(("HTTP/1.1 200", "HTTP/1.1 303")), accepted
            refused = [asked(door, *headers) for headers in wrong_headers(raw)]
            refused.append(asked(door, query=f"?key={key}&api_key={key}&token={key}"))
            refused.append(asked(door, body=json.dumps(chat(api_key=key)).encode()))
            for answer in refused:
                assert answer.startswith("HTTP/1.1 401"), answer
            broken = [asked(door, *headers) for headers in malformed(raw)]
            for answer in broken:
                assert not answer or answer.startswith("HTTP/1.1 4"), answer
            said += [accepted, *refused, *broken]
        for text, code in sockets(house, key):
            assert code in (1008, 400, 401), text
            said.append(text)
    logs = [each.read_text(errors="replace") for each in (folder / mode).glob("*.log")]
    assert len(logs) == len(house.front) + 2  # the worker's and the broker's
    metrics = [page(f"{each.admin_url}/metrics") for each in house.front]
    shown = set[str]().union(*map(parts, [*said, *logs, *metrics]))
    encoded = base64.b64encode(f"user:{KEY}".encode()).decode()
    assert shown & (parts(SECRET_PART) | parts(GOOD_TOKEN) | parts(encoded)) == set()


def test_every_token_that_cheats_is_401_over_http_and_told_no_more(
    house: House, mode: Mode, folder: Path
) -> None:
    wrong, said = {}, []
    for kind, token in TOKENS.items():
        answer = asked(house.doors[0], bearer(token))
        said.append(answer)
        # A null byte is in no header: what is no HTTP is 400 before anybody asks for keys.
        if not answer.startswith("HTTP/1.1 400" if b"\0" in token else "HTTP/1.1 401"):
            wrong[kind] = answer
    assert wrong == {}
    logs = [each.read_text(errors="replace") for each in (folder / mode).glob("*.log")]
    shown = set[str]().union(*map(parts, [*said, *logs]))
    tokens = [token.decode("latin-1") for token in TOKENS.values() if token.count(b".") == 2]
    assert shown & set[str]().union(*map(parts, tokens)) == set()


def test_every_token_that_cheats_closes_a_socket_with_1008(house: House) -> None:
    url = (house.streamers or house.doors)[0].url

    async def run() -> dict[str, Any]:
        wrong: dict[str, Any] = {}
        for kind, token in TOKENS.items():
            text = token.decode("latin-1")
            ways: list[tuple[Any, dict[str, Any]]] = [({"type": "auth", "key": text}, {})]
            if text and text.isprintable():
                headers = {"Authorization": f"Bearer {text}"}
                ways.append((None, {"additional_headers": headers}))
            for first, more in ways:
                found = await on_a_socket(url, first, **more)
                too_long = first is None and len(text) > HEADER_BYTES_MAX
                if found[1] != (431 if too_long else 1008):
                    wrong[kind] = found
        return wrong

    assert asyncio.run(run()) == {}
