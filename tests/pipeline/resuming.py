"""A client that does what a good one does: it asks again where it is refused, and resumes where it
is interrupted, until it has a whole stream."""

import asyncio
import contextlib
import itertools
import json
from dataclasses import dataclass
from types import TracebackType

import httpx

from tests.pipeline.asking import CHAT
from tests.sse import Event, Reader

PAUSE_S = 0.2


@dataclass
class Counts:
    """What a client lived through."""

    whole: int = 0
    refused: int = 0
    resumed: int = 0


class Resuming:
    """Asks at `doors` in turn, and resumes at `streamers` in turn."""

    def __init__(self, doors: list[str], streamers: list[str]) -> None:
        self.counts = Counts()
        self._doors = itertools.cycle(doors)
        self._streamers = itertools.cycle(streamers)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(timeout=20, limits=limits, verify=False)

    async def __aenter__(self) -> "Resuming":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def exact(self, body: dict[str, object], pieces: list[str]) -> None:
        """Get a whole stream; fail unless it brings every piece once, in order."""
        events = await self.whole(body)
        assert [event.id for event in events] == [str(k) for k in range(len(pieces) + 1)]
        chunks = [event.json["choices"][0]["delta"].get("content", "") for event in events]
        assert [chunk for chunk in chunks if chunk] == pieces
        self.counts.whole += 1

    async def whole(self, body: dict[str, object]) -> list[Event]:
        """Return all events of a stream, however often it has to be resumed."""
        content = json.dumps(body | {"stream": True}).encode()
        events: list[Event] = []
        request: str | None = None
        location: str | None = None
        while True:
            if location is not None:
                asked, location = self._http.build_request("GET", location), None
            elif request is None:
                asked = self._http.build_request("POST", next(self._doors) + CHAT, content=content)
            else:
                self.counts.resumed += 1
                url = f"{next(self._streamers)}/v1/streams/{request}"
                last = {"last-event-id": events[-1].id or ""} if events else {}
                asked = self._http.build_request("GET", url, headers=last)
            try:
                answer = await self._http.send(asked, stream=True)
            except httpx.TransportError:
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                match answer.status_code:
                    case 200:
                        request = answer.headers["x-request-id"]
                        if await self._read(answer, events):
                            return events
                    case 303:
                        request = answer.headers["x-request-id"]
                        location = answer.headers["location"]
                    case 503:
                        self.counts.refused += 1
                        await asyncio.sleep(PAUSE_S)
                    case status:
                        # The ticket of a streamer that has been replaced.
                        assert (status, request is not None) == (410, True), await answer.aread()
            finally:
                await answer.aclose()

    async def _read(self, answer: httpx.Response, events: list[Event]) -> bool:
        """Take events until the end; tell whether the stream is whole."""
        reader = Reader()
        with contextlib.suppress(httpx.TransportError):
            async for part in answer.aiter_raw():
                for event in reader.feed(part):
                    if event.data == "[DONE]":
                        return True
                    if event.id is None:
                        assert event.json["error"]["code"] == "stream_interrupted", event
                        return False
                    events.append(event)
        return False
