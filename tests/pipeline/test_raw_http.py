"""What is no HTTP, or offers another protocol: answered in the API's shape, never left waiting."""

import json
import socket

import pytest

from tests.pipeline.asking import CHAT, chat, hook, refusal
from tests.pipeline.conftest import System

ASK = json.dumps(chat(max_tokens=1)).encode()
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode()
SOCKET = (
    f"GET {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
).encode()
KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
V13 = b"Sec-WebSocket-Version: 13\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABk\r\n"


def _connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def _all(client: socket.socket) -> bytes:
    """Return what comes until the other side closes."""
    found = b""
    while piece := client.recv(65536):
        found += piece
    return found


def _one(client: socket.socket) -> tuple[bytes, bytes]:
    """Return the head and the body of one answer with a length."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(1) or pytest.fail(f"closed after {found!r}")
    lines = found.lower().split(b"\r\n")
    [size] = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
    body = b""
    while len(body) < size:
        body += client.recv(size - len(body)) or pytest.fail(f"closed after {body!r}")
    return found, body


NO_HTTP = {
    "an unknown method": b"FOO /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "the hello of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 50,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a blank in a header's name": HEAD + b"x y: z\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "a length below 0": HEAD + b"Content-Length: -5\r\n\r\n",
    "a length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a chunk without a size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a NUL in a header": HEAD + b"x: a\x00b\r\n\r\n",
    "bytes that are no ASCII in the path": b"GET /v1/\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("kind", NO_HTTP)
def test_what_is_no_http_is_400_in_the_apis_shape(system: System, kind: str) -> None:
    with _connected(system.url) as client:
        client.sendall(NO_HTTP[kind])
        head, _, body = _all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"x-request-id: req_" in head
    assert b"content-type: application/json" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("target", ["example.com:443", CHAT])
def test_who_takes_it_for_a_proxy_is_405(system: System, target: str) -> None:
    """A CONNECT was read again and again, to the interpreter's last frame, and never answered."""
    with _connected(system.url) as client:
        client.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        head, _, body = _all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
    assert json.loads(body)["error"]["code"] == "method_not_allowed"


def test_a_head_without_end_is_refused_and_not_kept(system: System) -> None:
    with _connected(system.url) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nx: ")
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            client.sendall(b"a" * 64 * 1024 * 1024)


def test_a_head_and_a_large_body_in_one_piece_are_a_request(system: System) -> None:
    body = json.dumps(chat("x", max_tokens=0, user="u" * 200_000)).encode()
    with _connected(system.url) as client:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head, said = _one(client)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(said)["error"]["param"] == "max_tokens"


def test_what_comes_after_a_request_does_not_stand_in_its_answer(system: System) -> None:
    sim = hook("a", "b", ttft_ms=0, itl_ms=60_000)  # so that its answer has not ended by then
    body = json.dumps(chat(stream=True, sim=sim)).encode()
    with _connected(system.url) as client:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        found = client.recv(12)
        client.sendall(b"\x00garbage\r\n\r\n")
        found += _all(client)
    assert found.count(b"HTTP/1.1 ") == 1
    assert b"not valid HTTP" not in found
    system.wait_at_rest()


@pytest.mark.parametrize("offered", [b"h2c", b"websocket", b"TLS/1.0"])
def test_a_post_that_offers_another_protocol_is_a_post(system: System, offered: bytes) -> None:
    with _connected(system.url) as client:
        client.sendall(HEAD + OFFER % offered + b"Content-Length: %d\r\n\r\n" % 2)
        client.sendall(b"{}")
        head, body = _one(client)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["param"] == "model"
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert _one(client)[0].startswith(b"HTTP/1.1 200 ")
    size = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(ASK)
    with _connected(system.url) as client:
        client.sendall(HEAD + OFFER % offered + size + ASK + b"\r\n0\r\n\r\n")
        head, _ = _one(client)
    assert head.startswith(b"HTTP/1.1 200 " if system.mode == "gateway" else b"HTTP/1.1 303 ")


NO_HANDSHAKE = {
    "no key": (SOCKET + V13 + b"\r\n", 400),
    "no version": (SOCKET + KEY + b"\r\n", 400),
    "an older version": (SOCKET + KEY + b"Sec-WebSocket-Version: 8\r\n\r\n", 400),
    "a cookie of 9 kB": (SOCKET + KEY + V13 + b"Cookie: " + b"a" * 9000 + b"\r\n\r\n", 431),
    "200 headers": (SOCKET + KEY + V13 + b"x: y\r\n" * 200 + b"\r\n", 431),
}


@pytest.mark.parametrize("kind", NO_HANDSHAKE)
def test_a_handshake_that_fails_is_answered_in_the_apis_shape(system: System, kind: str) -> None:
    asked, status = NO_HANDSHAKE[kind]
    with _connected(system.socket_end.url) as client:
        client.sendall(asked)
        head, _, body = _all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"x-request-id: req_" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


GETS = ["/v1/models", "/v1/models/sim", "/docs", "/openapi.json", "/healthz", "/readyz", "/metrics"]
POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
OF_ONE = [
    "/v1/models/none",
    "/v1/responses/resp_x",
    "/v1/responses/resp_x/cancel",
    "/v1/responses/resp_x/input_items",
    "/v1/requests/req_x/cancel",
    "/v1/streams/req_x",
    "/v1/replies/x",
]
METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE"]


@pytest.mark.parametrize("path", [*GETS, *POSTS, *OF_ONE])
def test_every_method_on_every_route_has_an_answer_in_the_apis_shape(
    system: System, path: str
) -> None:
    with system.client() as client:
        for method in METHODS:
            answer = client.request(method, path)
            served = method in ("GET", "HEAD") and path in GETS
            empty_post = method == "POST" and path in POSTS
            expected = (200,) if served else (400,) if empty_post else (404, 405)
            assert answer.status_code in expected, (method, answer.text)
            if method == "HEAD":
                assert answer.content == b""
            elif not served:
                assert refusal(answer)["message"]
            if answer.status_code == 405:
                assert answer.headers["allow"]
