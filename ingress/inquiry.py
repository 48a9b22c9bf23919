"""Answers operators, and nodes that were asked to cancel, about the requests that wait here.

Rule: what is withdrawn is out of the queue before the answer is given, so that none of it is let go
afterwards; its clients are told in the turns that follow, so that a long queue stops nobody.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import msgspec

from headrace.bus import Bus, Message
from ingress import census
from ingress.waiting import Turn, WaitingRoom
from schemas import subjects
from schemas.errors import RequestCancelled
from schemas.waiting import (
    CountQuestion,
    FindAnswer,
    Place,
    Selection,
    WithdrawAnswer,
)

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

REMEMBERED_MAX: Final = 10_000
"""Of how many withdrawn requests it is known that they were."""
_CHUNK: Final = 100


class Inquiry:
    """What one ingress node answers; `start` it."""

    def __init__(
        self, bus: Bus, room: WaitingRoom, *, node: str, clock: Callable[[], float]
    ) -> None:
        """`clock` is the one of the tickets' times."""
        self._bus = bus
        self._room = room
        self._node = node
        self._clock = clock
        self._withdrawn: dict[str, str] = {}

    async def start(self) -> None:
        """Hear the questions. Raises BrokerAway."""
        await self._bus.subscribe(subjects.WAITING_COUNT, self._count)
        await self._bus.subscribe(subjects.WAITING_FIND, self._find)
        await self._bus.subscribe(subjects.WAITING_WITHDRAW, self._withdraw)

    async def _count(self, message: Message) -> None:
        question = _read(message, CountQuestion)
        if question is not None:
            answer = await asyncio.to_thread(
                census.count,
                self._room.halls(),
                question,
                node=self._node,
                now_s=self._clock(),
            )
            await self._bus.publish(message.reply, msgspec.json.encode(answer))

    async def _find(self, message: Message) -> None:
        selection = _read(message, Selection)
        if selection is not None:
            answer = FindAnswer(node=self._node, place=self._place(selection))
            await self._bus.publish(message.reply, msgspec.json.encode(answer))

    def _place(self, selection: Selection) -> Place | None:
        found = None if selection.request is None else self._room.find(selection.request)
        if found is None or not census.selects(selection, found.model, found.ticket):
            return None
        ticket, mark, now_s = found.ticket, found.mark, self._clock()
        return Place(
            lane=ticket.lane,
            model=found.model,
            partition=ticket.partition,
            tenant=ticket.tenant,
            priority_class=ticket.priority_class,
            age_s=round(max(now_s - ticket.arrived_s, 0.0), 3),
            gives_up_in_s=round(ticket.give_up_s - now_s, 3),
            prompt_bytes=ticket.prompt_bytes,
            ahead=found.ahead,
            mark=mark,
        )

    async def _withdraw(self, message: Message) -> None:
        selection = _read(message, Selection)
        if selection is None or selection == Selection():
            return  # all that waits is nobody's to end
        taken = self._room.take_out(
            lambda model, ticket: census.selects(selection, model, ticket), selection.request
        )
        before = not taken and self._withdrew(selection)
        self._withdrawn |= {ticket.request: ticket.tenant for ticket, _ in taken}
        for request in [*itertools.islice(self._withdrawn, self._too_many)]:
            del self._withdrawn[request]
        answer = WithdrawAnswer(node=self._node, withdrawn=len(taken), before=before)
        try:
            await self._bus.publish(message.reply, msgspec.json.encode(answer))
        finally:  # nobody else knows of them any more, whoever hears the answer
            await self._tell(turn for _, turn in taken)

    async def _tell(self, turns: Iterable[Turn]) -> None:
        for number, turn in enumerate(turns):
            if not turn.done():
                turn.set_exception(RequestCancelled("The request was cancelled."))
            if number % _CHUNK == _CHUNK - 1:
                await asyncio.sleep(0)

    def _withdrew(self, selection: Selection) -> bool:
        if selection.request is None or selection.request not in self._withdrawn:
            return False
        return selection.tenant in (None, self._withdrawn[selection.request])

    @property
    def _too_many(self) -> int:
        return max(len(self._withdrawn) - REMEMBERED_MAX, 0)


def _read(message: Message, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(message.data, type=kind)
    except msgspec.MsgspecError as error:
        log.warning("a question on %s that cannot be read: %s", message.subject, error)
        return None
