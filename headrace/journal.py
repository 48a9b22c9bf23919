"""Reading a stream back by subject, through batched direct gets (NATS ADR-31)."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final, NamedTuple

import msgspec

from headrace.bus import (
    API_TIMEOUT_S,
    BrokerAway,
    BrokerRefused,
    Bus,
    Message,
    raise_no_responders,
)

SEQUENCE: Final = "Nats-Sequence"
SUBJECT: Final = "Nats-Subject"
STORED_AT: Final = "Nats-Time-Stamp"

_BATCH: Final = 1000
_BATCH_BYTES: Final = 8 * 1024 * 1024
"""A message larger than this comes alone."""


class Entry(NamedTuple):
    """A stored message: its sequence in the stream, its subject and its bytes."""

    seq: int
    subject: str
    data: bytes
    deleted: bool = False


async def read(bus: Bus, stream: str, subject: str, *, after_seq: int = 0) -> list[Entry]:
    """Return the messages under a subject (or filter) in order, those after a stream sequence.

    Of a key-value bucket, which keeps one message per key, these are its entries.
    Raises BrokerAway and BrokerRefused.
    """
    messages = walk(bus, stream, subject, after_seq=after_seq)
    return [_entry(message.data, message.headers or {}) async for message in messages]


async def walk(
    bus: Bus, stream: str, subject: str, *, after_seq: int = 0, batch: int = _BATCH
) -> AsyncGenerator[Message, None]:
    """Yield the messages that `read` returns, as stored, holding one batch of them at a time.

    Who stops early closes it (`contextlib.aclosing`). Raises as `read`.
    """
    more = True
    while more:
        messages, more = await _read_batch(
            bus, stream, subject, after_seq=after_seq, batch=batch, bytes_max=_BATCH_BYTES
        )
        for message in messages:
            yield message
        if messages:
            after_seq = int((messages[-1].headers or {})[SEQUENCE])


async def read_page(
    bus: Bus, stream: str, subject: str, *, after_seq: int, bytes_max: int
) -> tuple[list[Entry], bool]:
    """Return the next messages as `read` does, about `bytes_max` of them, and whether more follow.

    Raises BrokerAway and BrokerRefused.
    """
    messages, more = await _read_batch(
        bus, stream, subject, after_seq=after_seq, batch=_BATCH, bytes_max=bytes_max
    )
    return [_entry(message.data, message.headers or {}) for message in messages], more


async def _read_batch(
    bus: Bus, stream: str, subject: str, *, after_seq: int, batch: int, bytes_max: int
) -> tuple[list[Message], bool]:
    """Return one batch, and whether there is more; a message over `bytes_max` comes alone."""
    query = {
        "seq": after_seq + 1,
        "next_by_subj": subject,
        "batch": batch,
        "max_bytes": bytes_max,
    }
    messages: list[Message] = []
    async with aclosing(_gather(bus, f"$JS.API.DIRECT.GET.{stream}", query)) as answers:
        async for answer in answers:
            headers = answer.headers or {}
            match headers.get("Status"):
                case None:
                    messages.append(answer)
                case "204":  # end of batch
                    pending = headers.get("Nats-Num-Pending", "0") != "0"
                    return messages, pending and bool(messages)
                case "404":  # nothing under this subject
                    break
                case status:
                    description = headers.get("Description", "")
                    raise BrokerRefused(description, code=0, status=int(status))
    return messages, False


async def _gather(
    bus: Bus, subject: str, body: Mapping[str, object]
) -> AsyncGenerator[Message, None]:
    """Ask once and yield every answer until the caller stops. Raises BrokerAway on a pause, and
    when the connection breaks."""
    answers: asyncio.Queue[Message | None] = asyncio.Queue()

    async def put(message: Message) -> None:
        answers.put_nowait(message)

    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox, put)
    broken = bus.broken()
    broken.add_done_callback(lambda _: answers.put_nowait(None))
    try:
        await bus.publish(subject, msgspec.json.encode(body), reply=inbox)
        while True:
            try:
                async with asyncio.timeout(API_TIMEOUT_S):
                    answer = await answers.get()
            except TimeoutError:
                raise BrokerAway(f"no answer on {subject}") from None
            if answer is None:
                raise BrokerAway("the connection broke")
            raise_no_responders(answer)
            yield answer
    finally:
        if not broken.cancel():
            broken.exception()  # else asyncio tells that nobody has looked at it
        await subscription.unsubscribe()


def _entry(data: bytes, headers: Mapping[str, str]) -> Entry:
    # A key-value delete or an expired entry's marker is a message too.
    deleted = "KV-Operation" in headers or "Nats-Marker-Reason" in headers
    return Entry(int(headers[SEQUENCE]), headers[SUBJECT], data, deleted)
