"""A reader of server-sent events as WHATWG HTML, section 9.2.6, says; for tests."""

import json
from typing import Any, NamedTuple


class Event(NamedTuple):
    """An event: its id and its name, as far as the stream has named one in it, and its data."""

    id: str | None
    data: str
    name: str | None = None

    @property
    def json(self) -> Any:
        return json.loads(self.data, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


class Reader:
    """Takes bytes as they come, in whatever cuts."""

    def __init__(self) -> None:
        self.comments: list[str] = []
        self.retry_ms: int | None = None
        self._rest = b""
        self._id: str | None = None
        self._name: str | None = None
        self._data: list[str] = []

    def feed(self, content: bytes) -> list[Event]:
        """Return the events that are complete now."""
        events = []
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            event = self._line(line.removesuffix(b"\r").decode())
            if event is not None:
                events.append(event)
        return events

    @property
    def at_end(self) -> bool:
        """Whether nothing incomplete is left."""
        return not self._rest and not self._data and self._id is self._name is None

    def _line(self, line: str) -> Event | None:
        if not line:
            data, self._data = self._data, []
            event_id, self._id = self._id, None
            name, self._name = self._name, None
            return Event(event_id, "\n".join(data), name) if data else None
        if line.startswith(":"):
            self.comments.append(line[1:].removeprefix(" "))
            return None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "id":
            self._id = value
        elif field == "event":
            self._name = value
        elif field == "retry":
            self.retry_ms = int(value)
        else:
            raise AssertionError(f"a field that we never send: {line!r}")
        return None


def events_of(content: bytes) -> list[Event]:
    """Return the events of a whole stream."""
    reader = Reader()
    events = reader.feed(content)
    assert reader.at_end, "the stream ends inside an event"
    return events
