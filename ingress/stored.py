"""Stored responses: what each was made from, in `responses`, and what has become of it.

Rule: a stored response is its record and its frames; the object is rendered from both, never kept.
A record holds the whole conversation before it too, so that a turn is found by one read, whatever
has become of the turns before.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace import journal
from headrace.bus import Bus
from headrace.kept import kept
from headrace.peek import find
from schemas import subjects
from schemas.errors import DeadlineExceeded, RequestCancelled, RequestTooLarge
from schemas.reply import Broken, Reply
from schemas.response_events import ResponseEvents
from schemas.response_items import Item
from schemas.responses import response_id
from schemas.wire import BadFrame, Shape, Usage, decode_frame

_STREAM: Final = f"KV_{subjects.RESPONSES}"
_MESSAGE_BYTES: Final = 256  # the protocol's own lines
_DELETED: Final = {"KV-Operation": "DEL"}


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What a response was made from. `items` is JSON: the conversation before it, and its input."""

    version: int
    shape: Shape
    deadline_s: float  # seconds since the epoch
    background: bool
    items: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response as it stands."""

    request: str
    record: Record
    events: ResponseEvents

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.events.status not in ("queued", "in_progress")

    @property
    def items(self) -> list[Item]:
        """What it was made from."""
        found: list[Item] = msgspec.json.decode(self.record.items)
        return found


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


async def store(bus: Bus, record: Record, *, tenant: str, request: str) -> None:
    """Store a record. Raises RequestTooLarge, BrokerAway and BrokerRefused."""
    data = _encode(record)
    if len(data) + _MESSAGE_BYTES > bus.payload_bytes_max:
        raise RequestTooLarge(
            f"The conversation takes {len(data)} bytes to store; the broker's limit is"
            f" {bus.payload_bytes_max} bytes a message. With 'store' false it is not stored."
        )
    await bus.store(_key(tenant, request), data)


async def look(bus: Bus, *, tenant: str, request: str) -> Stored | None:
    """Return a tenant's stored response, None if there is none. Raises BrokerAway and
    BrokerRefused."""
    record = await _read(bus, tenant, request)
    if record is None:
        return None
    events, ended = await _replay(bus, record, tenant, request)
    if not ended and await find(bus, request) is None:
        # It may have ended in between: the queue is left only after the log has the end.
        events, ended = await _replay(bus, record, tenant, request)
        if not ended:
            # Its client left, or its time was over, before anybody began or could say so.
            late = time.time() > record.deadline_s
            kind = DeadlineExceeded if late else RequestCancelled
            events.render([Broken(kind.code or "", kind.__doc__ or "", Usage(0, 0, 0))])
    return Stored(request, record, events)


async def remove(bus: Bus, *, tenant: str, request: str) -> None:
    """Forget a stored response that has ended: record, log and answer. Raises as `look`."""
    await bus.store(_key(tenant, request), b"", headers=_DELETED)
    await bus.purge(subjects.REPLIES, subjects.replies_to(request, tenant=tenant))
    answer = subjects.answer_key(tenant=tenant, request=request)
    await bus.purge(_STREAM, answer)
    await bus.purge(_STREAM, f"{answer}.*")


def _key(tenant: str, request: str) -> str:
    return subjects.response_key(tenant=tenant, response=response_id(request))


async def _read(bus: Bus, tenant: str, request: str) -> Record | None:
    found = await journal.read(bus, _STREAM, _key(tenant, request))
    if not found or found[-1].deleted:
        return None
    return _decode(found[-1].data)


async def _frames(bus: Bus, tenant: str, request: str) -> AsyncIterator[tuple[int | None, bytes]]:
    """Yield the frames of a reply, each with its sequence in the log if it stands there."""
    answer = await kept(bus, tenant=tenant, request=request)
    if answer is not None:
        for data in answer:
            yield None, data
        return
    log_subject = subjects.replies_to(request, tenant=tenant)
    for entry in await journal.read(bus, subjects.REPLIES, log_subject):
        yield entry.seq, entry.data


async def _replay(
    bus: Bus, record: Record, tenant: str, request: str
) -> tuple[ResponseEvents, bool]:
    """Return the events of what there is of a reply, and whether its end is there."""
    reply = Reply()
    events = ResponseEvents(request, record.shape)
    opened = False
    async for seq, data in _frames(bus, tenant, request):
        try:
            shown = reply.take(decode_frame(data), stored_seq=seq)
        except BadFrame:
            continue
        if reply.started and not opened:
            opened = True
            events.opening()
        events.render(shown)
    return events, reply.ended
