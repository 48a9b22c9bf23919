"""Reading all of a large stream, at a third of what direct gets cost the reader.

`journal` asks by direct gets, whose every answer carries headers, and parsing those takes the
client 40 µs a message. What a consumer delivers has the headers it was stored with: mostly none. So
this makes one in the server's memory for the length of the reading. It is for thousands of
messages, once; for a few, and for often, `journal` is right.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

import msgspec

from headrace.bus import (
    API_TIMEOUT_S,
    BrokerAway,
    BrokerRefused,
    Bus,
    Message,
    raise_no_responders,
)

_BATCH: Final = 10_000
_NANOSECONDS: Final = 1_000_000_000
_FORGOTTEN_S: Final = 30
"""A reader that dies leaves its consumer for so long."""
_NO_MORE: Final = ("404", "408")


async def read(bus: Bus, stream: str, subject: str) -> AsyncGenerator[list[Message], None]:
    """Yield the messages under a filter in order, page by page, those stored meanwhile too.

    A message with headers was stored with them. Raises BrokerAway and BrokerRefused.
    """
    name = f"bulk-{secrets.token_hex(8)}"
    config = {
        "name": name,
        "filter_subject": subject,
        "deliver_policy": "all",
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": _FORGOTTEN_S * _NANOSECONDS,
    }
    pages = _Pages()
    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox, pages.put)
    try:
        body = {"stream_name": stream, "config": config}
        await bus.api(f"CONSUMER.CREATE.{stream}.{name}.{subject}", body)
        more = True
        while more:
            query = msgspec.json.encode({"batch": _BATCH, "no_wait": True})
            await bus.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", query, reply=inbox)
            page = await pages.next()
            more = _status(page[-1]) is None
            yield page if more else page[:-1]
    finally:
        await subscription.unsubscribe()
        with suppress(BrokerAway, BrokerRefused):
            await bus.api(f"CONSUMER.DELETE.{stream}.{name}")


class _Pages:
    """Gathers what a pull brings: a whole batch, or less and the server's word that it is all."""

    def __init__(self) -> None:
        self._page: list[Message] = []
        self._whole = asyncio.Event()

    async def put(self, message: Message) -> None:
        self._page.append(message)
        if len(self._page) == _BATCH or _status(message) is not None:
            self._whole.set()

    async def next(self) -> list[Message]:
        """Return the page that was asked for. Raises BrokerAway and BrokerRefused."""
        try:
            async with asyncio.timeout(API_TIMEOUT_S):
                await self._whole.wait()
        except TimeoutError:
            raise BrokerAway("no answer to a pull") from None
        page, self._page = self._page, []
        self._whole.clear()
        raise_no_responders(page[-1])
        if _status(page[-1]) not in (None, *_NO_MORE):
            headers = page[-1].headers or {}
            raise BrokerRefused(
                headers.get("Description", ""), code=0, status=int(headers["Status"])
            )
        return page


def _status(message: Message) -> str | None:
    """Return what the server says of a pull; None for a stored message."""
    return message.headers.get("Status") if message.headers else None
