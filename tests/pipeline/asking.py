"""How the acceptance tests ask: bodies, whole streams, and what they said."""

import asyncio
import json
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.sse import Event, events_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATIENCE_S = 120.0


def chat(content: Any = "Say something.", **more: Any) -> dict[str, Any]:
    """Return the body of a chat request to the model `sim`."""
    return {"model": "sim", "messages": [{"role": "user", "content": content}]} | more


def hook(*pieces: Any, **more: Any) -> dict[str, Any]:
    """Return the hook that makes the engine say these pieces."""
    return {"pieces": list(pieces)} | more


@dataclass(frozen=True)
class Streamed:
    """A whole stream: its bytes and its events."""

    request: str
    raw: bytes

    @property
    def events(self) -> list[Event]:
        return events_of(self.raw)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The JSON of every event but [DONE]."""
        return [event.json for event in self.events if event.data != "[DONE]"]

    def text(self, choice: int = 0) -> str:
        """The content of a choice, of either endpoint."""
        parts = [part for chunk in self.chunks for part in chunk.get("choices", ())]
        own = [part for part in parts if part["index"] == choice]
        return "".join(p.get("text") or p.get("delta", {}).get("content") or "" for p in own)

    def reasons(self) -> dict[int, str]:
        """The finish reason of each choice; given once only."""
        found: dict[int, str] = {}
        for chunk in self.chunks:
            for part in chunk.get("choices", ()):
                if part["finish_reason"] is not None:
                    assert part["index"] not in found
                    found[part["index"]] = part["finish_reason"]
        return found


def stream(client: httpx.Client, body: dict[str, Any], path: str = CHAT) -> Streamed:
    """Ask for a stream and read it to its end."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        raw = answer.read()
        assert answer.status_code == 200, raw
        assert answer.headers["content-type"].startswith("text/event-stream")
        return Streamed(answer.headers["x-request-id"], raw)


def collect(client: httpx.Client, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    """Ask for the whole answer at once."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def stream_raw(
    url: str, body: dict[str, Any], path: str = CHAT, *, on_the_way: asyncio.Semaphore | None = None
) -> bytes:
    """Ask for a stream and return its bytes, as a client that costs little: for many at once.

    `on_the_way` bounds how many have sent their request and see nothing of their stream yet.
    """
    content = json.dumps(body | {"stream": True}).encode()
    async with AsyncExitStack() as way:
        if on_the_way is not None:
            await way.enter_async_context(on_the_way)
        head, reading = await _begin("POST", url + path, content)
        if head.startswith(b"HTTP/1.1 303"):
            [location] = [x for x in head.split(b"\r\n") if x.lower().startswith(b"location")]
            await reading
            head, reading = await _begin("GET", location.split(b": ", 1)[1].decode(), b"")
    rest = await reading
    assert head.startswith(b"HTTP/1.1 200"), (head, rest)
    raw = b""
    while rest:  # chunks: RFC 9112, section 7.1
        size, rest = rest.split(b"\r\n", 1)
        raw, rest = raw + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return raw


async def _begin(method: str, url: str, content: bytes) -> tuple[bytes, Awaitable[bytes]]:
    """Return the head of an answer, and what reads the rest and closes the connection."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)

    async def rest() -> bytes:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await reader.read(-1)
        finally:
            writer.close()

    head = f"{method} {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return (await reader.readuntil(b"\r\n\r\n"))[:-4], rest()
    except BaseException:
        writer.close()
        raise


def refusal(answer: httpx.Response) -> dict[str, Any]:
    """Return the error of an answer, which is in the API's own shape."""
    body = answer.json()
    assert list(body) == ["error"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["message"], body
    assert body["error"]["type"], body
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    error: dict[str, Any] = body["error"]
    return error
