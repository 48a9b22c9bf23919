"""A client that checks what it is told, and does what a careful client does when a node dies.

A POST that was refused, or whose connection broke before its head came, is asked again at another
node: as the same request where it has an Idempotency-Key, as a new one otherwise. A stream that
breaks is resumed at another node after its last event. The old connection stays open until the new
one has its head: leaving would be a cancel.
"""

import asyncio
import itertools
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from chaos.events import INTERRUPTED, Ended, Interrupted, Token, Used, events
from chaos.http import Answer, Cut, exchange
from chaos.ledger import Tally
from chaos.orders import Expected, Manner, Order

HEAD_S: Final = 40.0
"""Longer than ingress waits for the broker's word (30 s), and than any process is frozen."""
SILENCE_S: Final = 30.0
"""Longer than the pause between comments (14 s), and than any process is frozen."""
IMPATIENT_S: Final = 2.5
WHOLE_S: Final = 60.0
ANSWER_S: Final = 300.0
"""So long that only what never comes is missed, on any machine."""
PAUSE_S: Final = 0.2
RETRY_AFTER_S_MAX: Final = 1.0
UNREACHABLE: Final = frozenset({429, 503})
ASK_AGAIN: Final = frozenset(
    {
        "broker_unavailable",
        "draining",
        "gone",  # a ticket of a streamer that is no more
        "no_workers",
        "no_streamers",
        "queue_full",
        "queue_timeout",
        "rate_limit_exceeded",
        INTERRUPTED,
    }
)
"""Codes after which a request without a stream is asked again as a new one."""


class _Left(Exception):
    """The client has left by its own will."""


@dataclass(frozen=True, slots=True)
class Doors:
    """Where requests are sent, and where streams are resumed."""

    posts: tuple[str, ...]
    reads: tuple[str, ...]


class Client:
    """Asks one order after the other."""

    def __init__(self, doors: Doors, *, number: int) -> None:
        self._posts = itertools.cycle(doors.posts[number % 2 :] + doors.posts[: number % 2])
        self._reads = itertools.cycle(doors.reads)

    async def ask(self, order: Order, tally: Tally) -> None:
        """Bring an order to its end, and note all that came in its tally."""
        error: str | None = None
        try:
            async with asyncio.timeout(ANSWER_S):
                if order.manner is Manner.WHOLE:
                    await self._whole(order, tally)
                else:
                    await self._streamed(order, tally)
        except _Left:
            tally.left = True
        except Ended as ended:
            if not (tally.cancelled and ended.code == "request_cancelled"):
                error = str(ended)
        except TimeoutError:
            return  # without an answer
        tally.end(now_s=time.monotonic(), error=error)

    async def learn(self, order: Order) -> Expected:
        """Return what a story says. Raises Ended, and TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                try:
                    return await self._told(order)
                except (Cut, Interrupted):
                    await asyncio.sleep(PAUSE_S)

    async def _told(self, order: Order) -> Expected:
        tokens = 0
        said: list[tuple[int, str]] = []
        async with AsyncExitStack() as stack:
            answer = await self._posted(stack, order, Tally(order, Expected((), 0), now_s=0.0))
            if answer is None:
                raise Cut("refused before anything went wrong")
            async with aclosing(events(answer, silence_s=SILENCE_S)) as found:
                async for event in found:
                    match event:
                        case Token(seq, text):
                            said.append((seq, text))
                        case Used(tokens):
                            pass
        return Expected(tuple(said), tokens)

    async def _whole(self, order: Order, tally: Tally) -> None:
        while True:
            try:
                async with AsyncExitStack() as stack:
                    answer = await self._posted(stack, order, tally)
                    if answer is not None:
                        self._take_whole(await answer.body(silence_s=WHOLE_S), tally)
                        return
            except Cut:
                pass
            tally.asked_again += 1
            await asyncio.sleep(PAUSE_S)

    def _take_whole(self, content: bytes, tally: Tally) -> None:
        body = msgspec.json.decode(content)
        [choice] = body["choices"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        tally.whole(text, now_s=time.monotonic())
        tally.usage(body["usage"]["completion_tokens"])

    async def _streamed(self, order: Order, tally: Tally) -> None:
        silence_s = IMPATIENT_S if order.manner is Manner.MOVE else SILENCE_S
        held = AsyncExitStack()
        try:
            answer = await self._opened(held, order, tally)
            while True:
                try:
                    if answer is not None:
                        await self._read(answer, tally, silence_s=silence_s)
                        return
                except (Cut, Interrupted):
                    pass
                fresh = AsyncExitStack()
                try:
                    answer = await self._resumed(fresh, tally)
                except BaseException:
                    await fresh.aclose()
                    raise
                await held.aclose()
                held = fresh
        finally:
            await held.aclose()

    async def _opened(self, stack: AsyncExitStack, order: Order, tally: Tally) -> Answer | None:
        """Return the stream of a request that was taken; None where it must be resumed."""
        while True:
            try:
                answer = await self._posted(stack, order, tally)
            except Cut:
                return None
            if answer is not None:
                return answer
            tally.asked_again += 1
            await asyncio.sleep(PAUSE_S)

    async def _posted(self, stack: AsyncExitStack, order: Order, tally: Tally) -> Answer | None:
        """Return the head of an answer; None where the request is to be asked again.

        Raises Cut where it was taken and its streamer cannot be reached, Ended where it failed.
        """
        url = next(self._posts) + order.path
        headers = {} if order.key is None else {"Idempotency-Key": order.key}
        try:
            answer = await stack.enter_async_context(
                exchange("POST", url, order.body, headers=headers, head_s=HEAD_S)
            )
        except Cut:
            return None
        request = answer.headers.get("x-request-id", "")
        if answer.status in (200, 303):
            tally.accepted(request, now_s=time.monotonic())
        if answer.status == 303:
            there = answer.headers["location"]
            answer = await stack.enter_async_context(exchange("GET", there, head_s=HEAD_S))
            if answer.status != 200 and order.manner is not Manner.WHOLE:
                raise Cut(f"the ticket was answered by {answer.status}")
        if answer.status == 200:
            return answer
        try:
            error = await _error(answer)
        except Cut:
            return None  # refused, whatever for
        if error.code not in ASK_AGAIN:
            raise error
        await _rest(answer)
        return None

    async def _read(self, answer: Answer, tally: Tally, *, silence_s: float) -> None:
        """Read a stream to its end. Raises Cut, Interrupted, Ended, and _Left."""
        manner, stop_after = tally.order.manner, tally.order.stop_after
        async with aclosing(events(answer, silence_s=silence_s)) as found:
            async for event in found:
                match event:
                    case Token(seq, text):
                        tally.token(seq, text, now_s=time.monotonic())
                    case Used(tokens):
                        tally.usage(tokens)
                if tally.tokens < stop_after or tally.cancelled:
                    continue
                if manner is Manner.LEAVE:
                    raise _Left
                if manner is Manner.CANCEL:
                    await self._cancel(tally)

    async def _cancel(self, tally: Tally) -> None:
        tally.cancelled = True
        while True:
            url = f"{next(self._reads)}/v1/requests/{tally.requests[-1]}/cancel"
            try:
                async with exchange("POST", url, head_s=HEAD_S) as answer:
                    if answer.status == 200:
                        return
                    if answer.status not in UNREACHABLE:
                        raise await _error(answer)
                    await _rest(answer)
            except Cut:
                await asyncio.sleep(PAUSE_S)

    async def _resumed(self, stack: AsyncExitStack, tally: Tally) -> Answer:
        """Return the rest of a stream, at the next node that has it. Raises Ended."""
        headers = {"Last-Event-ID": str(tally.last_id)} if tally.last_id >= 0 else {}
        while True:
            await stack.aclose()
            url = f"{next(self._reads)}/v1/streams/{tally.requests[-1]}"
            try:
                answer = await stack.enter_async_context(
                    exchange("GET", url, headers=headers, head_s=HEAD_S)
                )
                if answer.status == 200:
                    tally.resumed += 1
                    return answer
                if answer.status not in UNREACHABLE:
                    raise await _error(answer)
                await _rest(answer)
            except Cut:
                await asyncio.sleep(PAUSE_S)


async def _error(answer: Answer) -> Ended:
    """Return the error that a node answers with. Raises Cut."""
    content = await answer.body(silence_s=SILENCE_S)
    try:
        error: dict[str, Any] = msgspec.json.decode(content)["error"]
        return Ended(str(error["code"]), f"{answer.status}, {error['message']}")
    except (msgspec.MsgspecError, KeyError, TypeError):
        return Ended("no_json", f"{answer.status}, {content[:200]!r}")


async def _rest(answer: Answer) -> None:
    """Wait as long as the node says, but no longer than a test wants to."""
    said = answer.headers.get("retry-after", "")
    await asyncio.sleep(min(float(said) if said.isdigit() else PAUSE_S, RETRY_AFTER_S_MAX))
