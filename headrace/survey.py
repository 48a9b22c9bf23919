"""Reads the queue as the broker has it. Rule: from broker state alone, so it is right whatever else
runs.

The subjects come from stream info, what runs from consumer info and the stored messages up to each
consumer's delivered sequence, ages from the oldest message of each row.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from headrace import journal
from headrace.backlog import (
    Backlog,
    By,
    Mark,
    Standing,
    Taken,
    backlog_of,
    epoch_s,
)
from headrace.bus import Bus
from headrace.messages import NobodyAnswers
from schemas import subjects
from schemas.model import WorkerEntry
from schemas.subjects import REQUESTS, Cell

A = TypeVar("A")
T = TypeVar("T")

EVERYTHING: Final = ">"
_AT_ONCE: Final = 16
_BATCH: Final = 500


async def mark(bus: Bus) -> Mark:
    """Return the queue's counters now. Raises BrokerAway and BrokerRefused."""
    info = await bus.api(f"STREAM.INFO.{REQUESTS}")
    state = info["state"]
    return Mark(epoch_s(info["ts"]), state["messages"], state["last_seq"])


async def read_backlog(bus: Bus, by: By, *, only: str = EVERYTHING) -> Backlog:
    """Return the backlog of the requests under a filter. Raises BrokerAway and BrokerRefused."""
    standing = Standing()
    await _list_subjects(bus, only, standing)
    for taken in await _bounded(partial(_taken, bus), await _consumers(bus)):
        standing.take(taken)
    tokens = standing.tokens(by)
    found = await _bounded(partial(_oldest_s, bus, by), tokens)
    now_s = (await mark(bus)).at_s
    oldest_s = {token: at_s for token, at_s in zip(tokens, found, strict=True) if at_s is not None}
    return backlog_of(standing, by, oldest_s=oldest_s, now_s=now_s)


async def read_workers(bus: Bus) -> list[WorkerEntry]:
    """Return the workers whose heartbeats stand in their bucket; none where it is gone.

    Raises BrokerAway and BrokerRefused.
    """
    bucket = subjects.WORKERS
    try:
        entries = await journal.read(bus, f"KV_{bucket}", f"$KV.{bucket}.>")
    except NobodyAnswers:
        return []  # the queue is right without it
    found = []
    for entry in entries:
        with suppress(msgspec.MsgspecError):
            if not entry.deleted:
                found.append(msgspec.json.decode(entry.data, type=WorkerEntry))
    return found


async def _list_subjects(bus: Bus, only: str, standing: Standing) -> None:
    """Count the stream's subjects, page by page (100,000 each)."""
    offset = 0
    while True:
        query = {"subjects_filter": only, "offset": offset}
        info = await bus.api(f"STREAM.INFO.{REQUESTS}", query)
        page = info["state"].get("subjects") or {}
        standing.store(page)
        offset += len(page)
        if not page or offset >= info.get("total", 0):
            return


async def _consumers(bus: Bus) -> list[dict[str, Any]]:
    """Return the info of the queue's consumers, page by page (256 each)."""
    consumers: list[dict[str, Any]] = []
    while True:
        listed = await bus.api(f"CONSUMER.LIST.{REQUESTS}", {"offset": len(consumers)})
        consumers += listed["consumers"] or []
        if not listed["consumers"] or len(consumers) >= listed["total"]:
            return consumers


async def _taken(bus: Bus, info: dict[str, Any]) -> Taken:
    """Return what a consumer has delivered and is still stored."""
    unacknowledged = info["num_ack_pending"]  # at least as many as there are
    if not unacknowledged:
        return Taken((), 0)
    cells: list[Cell] = []
    up_to_seq = info["delivered"]["stream_seq"]
    stored = journal.walk(
        bus, REQUESTS, info["config"]["filter_subject"], batch=min(unacknowledged, _BATCH)
    )
    async with aclosing(stored) as messages:
        async for message in messages:
            headers = message.headers or {}
            if int(headers[journal.SEQUENCE]) > up_to_seq:
                break
            cell = Cell.parse(headers[journal.SUBJECT])
            if cell is not None:
                cells.append(cell)
    return Taken(tuple(cells), info["num_redelivered"])


async def _oldest_s(bus: Bus, by: By, token: str) -> float | None:
    """Return when a row's oldest request was stored; None when it has left since."""
    stored = journal.walk(bus, REQUESTS, subjects.requests_with(by.value, token), batch=1)
    async with aclosing(stored) as messages:
        async for message in messages:
            return epoch_s((message.headers or {})[journal.STORED_AT])
    return None


async def _bounded(ask: Callable[[A], Awaitable[T]], items: Iterable[A]) -> list[T]:
    """Ask about each item, a few at a time, and return the answers in order."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def ask_in_turn(item: A) -> T:
        async with room:
            return await ask(item)

    return await asyncio.gather(*[ask_in_turn(item) for item in items])
