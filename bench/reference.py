"""The reference: a bare ASGI application under uvicorn that sends the same bytes, no broker.

Rule: as little as the work allows. It sends the events that the gateway once sent, with the same
pacing: `/in-step` (one clock for all), `/own-clock` (as the request's hook says), `/at-once`,
`/hold` (one event and then nothing), `/accept` (the head alone), `/object` (no stream).
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import uvicorn

STEP_S: Final = 0.02
_SSE: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Clock:
    """Wakes all who wait at each step."""

    def __init__(self) -> None:
        self._step: asyncio.Future[None] | None = None
        self._due_s = 0.0

    def next(self) -> "asyncio.Future[None]":
        """Return the future of the next step."""
        if self._step is None or self._step.done():
            loop = asyncio.get_running_loop()
            self._step = loop.create_future()
            self._due_s = max(self._due_s + STEP_S, loop.time())
            loop.call_at(self._due_s, self._step.set_result, None)
        return self._step


class App:
    """The application; `events` are those of one whole stream."""

    def __init__(self, events: list[bytes], answer: bytes) -> None:
        self._events = events
        self._answer = answer
        self._clock = Clock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] == "/object":
            length = str(len(self._answer)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self._answer})
            return
        await send({"type": "http.response.start", "status": 200, "headers": _SSE})
        match scope["path"]:
            case "/in-step":
                await self._in_step(send)
            case "/own-clock":
                hook = json.loads(body)["sim"]
                await self._own_clock(send, hook["ttft_ms"] / 1e3, hook["itl_ms"] / 1e3)
            case "/at-once":
                await _send(send, b"".join(self._events), more=False)
            case path:
                if path == "/hold":
                    await _send(send, self._events[0], more=True)
                while (await receive())["type"] != "http.disconnect":
                    pass

    async def _in_step(self, send: Any) -> None:
        last = len(self._events) - 1
        for place, event in enumerate(self._events):
            await self._clock.next()
            await _send(send, event, more=place < last)

    async def _own_clock(self, send: Any, ttft_s: float, itl_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + ttft_s
        last = len(self._events) - 1
        for place, event in enumerate(self._events):
            await asyncio.sleep(due_s - loop.time())
            due_s += itl_s
            await _send(send, event, more=place < last)


async def _send(send: Any, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def split_events(raw: bytes) -> list[bytes]:
    """Return a whole stream's events; the last one holds all that follows the last token."""
    events = [event + b"\n\n" for event in raw.split(b"\n\n") if event]
    return [*events[:-2], b"".join(events[-2:])]


def main() -> None:
    """`python -m bench.reference PORT STREAM ANSWER`: serve the bytes of two files."""
    port, stream, answer = sys.argv[1:]
    app = App(split_events(Path(stream).read_bytes()), Path(answer).read_bytes())
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(port),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
    )


if __name__ == "__main__":
    main()
