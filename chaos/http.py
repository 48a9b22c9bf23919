"""HTTP/1.1 for clients that are to see connections break: one connection a request, no retries.

Rule: every way in which an exchange can fail is `Cut`; what was read before stays read.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import msgspec

CONNECT_S: Final = 5.0
_FAULTS: Final = (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError)


class Cut(Exception):
    """The connection could not be made, broke, or was silent for too long."""


class Answer:
    """An answer whose head has come."""

    def __init__(
        self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader
    ) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader
        self._chunked = headers.get("transfer-encoding") == "chunked"

    async def lines(self, *, silence_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the body's lines, without their ends, as they come. Raises Cut.

        A body that ends without its last chunk is cut too.
        """
        rest = b""
        while chunk := await self._chunk(silence_s):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest

    async def body(self, *, silence_s: float) -> bytes:
        """Return the whole body. Raises Cut."""
        chunks = []
        while chunk := await self._chunk(silence_s):
            chunks.append(chunk)
            if not self._chunked:
                break
        return b"".join(chunks)

    async def _chunk(self, silence_s: float) -> bytes:
        try:
            async with asyncio.timeout(silence_s):
                if not self._chunked:
                    return await self._reader.readexactly(
                        int(self.headers.get("content-length", 0))
                    )
                size = int(await self._reader.readuntil(b"\r\n"), 16)
                return (await self._reader.readexactly(size + 2))[:-2]
        except _FAULTS as error:
            raise Cut(f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def exchange(
    method: str,
    url: str,
    body: object = None,
    *,
    headers: Mapping[str, str] | None = None,
    head_s: float,
) -> AsyncIterator[Answer]:
    """Send a request and give its answer for the length of a block; leaving it closes.

    `body` is sent as JSON. Raises Cut when no head comes within `head_s`.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except _FAULTS as error:
        raise Cut(f"not connected: {type(error).__name__}: {error}") from error
    try:
        try:
            writer.write(_request(method, url, body, headers or {}))
            async with asyncio.timeout(head_s):
                head = await reader.readuntil(b"\r\n\r\n")
            answer = Answer(*_head(head), reader)
        except _FAULTS as error:
            raise Cut(f"no head: {type(error).__name__}: {error}") from error
        yield answer
    finally:
        writer.transport.abort()


def _request(method: str, url: str, body: object, headers: Mapping[str, str]) -> bytes:
    parts = urlsplit(url)
    content = b"" if body is None else msgspec.json.encode(body)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Connection: close",
        f"Content-Length: {len(content)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}
