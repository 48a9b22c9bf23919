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

_BATCH: Final = 1000


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
    entries: list[Entry] = []
    while True:
        query = {"seq": after_seq + 1, "next_by_subj": subject, "batch": _BATCH}
        if not await _read_batch(bus, stream, query, entries):
            return entries
        after_seq = entries[-1].seq


async def read_page(
    bus: Bus, stream: str, subject: str, *, after_seq: int, bytes_max: int
) -> tuple[list[Entry], bool]:
    """Return the next messages as `read` does, about `bytes_max` of them, and whether more follow.

    Raises BrokerAway and BrokerRefused.
    """
    entries: list[Entry] = []
    query = {"seq": after_seq + 1, "next_by_subj": subject, "batch": _BATCH, "max_bytes": bytes_max}
    more = await _read_batch(bus, stream, query, entries)
    return entries, more and bool(entries)


async def _gather(
    bus: Bus, subject: str, body: Mapping[str, object]
) -> AsyncGenerator[Message, None]:
    """Ask once and yield every answer until the caller stops. Raises BrokerAway on a pause."""
    answers: asyncio.Queue[Message] = asyncio.Queue()

    async def put(message: Message) -> None:
        answers.put_nowait(message)

    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox, put)
    try:
        await bus.publish(subject, msgspec.json.encode(body), reply=inbox)
        while True:
            try:
                async with asyncio.timeout(API_TIMEOUT_S):
                    answer = await answers.get()
            except TimeoutError:
                raise BrokerAway(f"no answer on {subject}") from None
            raise_no_responders(answer)
            yield answer
    finally:
        await subscription.unsubscribe()


async def _read_batch(
    bus: Bus, stream: str, query: dict[str, object], entries: list[Entry]
) -> bool:
    """Append one batch to `entries`; return whether there is more."""
    async with aclosing(_gather(bus, f"$JS.API.DIRECT.GET.{stream}", query)) as answers:
        async for answer in answers:
            headers = answer.headers or {}
            match headers.get("Status"):
                case None:
                    entries.append(_entry(answer.data, headers))
                case "204":  # end of batch
                    return headers.get("Nats-Num-Pending", "0") != "0"
                case "404":  # nothing under this subject
                    return False
                case status:
                    description = headers.get("Description", "")
                    raise BrokerRefused(description, code=0, status=int(status))
    return False


def _entry(data: bytes, headers: Mapping[str, str]) -> Entry:
    # A key-value delete or an expired entry's marker is a message too.
    deleted = "KV-Operation" in headers or "Nats-Marker-Reason" in headers
    return Entry(int(headers["Nats-Sequence"]), headers["Nats-Subject"], data, deleted)
