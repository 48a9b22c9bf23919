"""Asks every ingress node what waits there. Rule: who does not answer in time is not waited for.

No list says which ingress nodes there are: a question goes to all that listen, and the broker says
at once when nobody does. What is asked of the broker itself never waits for these answers.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from headrace.bus import Bus, Message
from headrace.messages import NobodyAnswers, raise_no_responders
from schemas import subjects
from schemas.waiting import (
    CountAnswer,
    CountQuestion,
    FindAnswer,
    Selection,
    WithdrawAnswer,
)

T = TypeVar("T", bound=msgspec.Struct)

ANSWER_S: Final = 0.5
"""How long the nodes may take; one that is not busy needs milliseconds."""


class Asked(NamedTuple, Generic[T]):
    """What became of a question about one request: the answer of the node that has it, None if
    none of the `nodes` that answered does."""

    nodes: int
    answer: T | None


async def count_waiting(bus: Bus, question: CountQuestion) -> list[CountAnswer]:
    """Return what waits at each node that answered. Raises BrokerAway."""
    return await _ask_each(bus, subjects.WAITING_COUNT, question, CountAnswer)


async def find_waiting(bus: Bus, request: str) -> Asked[FindAnswer]:
    """Return where a request waits. Raises BrokerAway."""
    answers = await _ask_each(
        bus,
        subjects.WAITING_FIND,
        Selection(request=request),
        FindAnswer,
        enough=_has_it,
    )
    return Asked(len(answers), next(filter(_has_it, answers), None))


async def withdraw_waiting(bus: Bus, selection: Selection) -> list[WithdrawAnswer]:
    """Let requests wait no more, whose clients are told that they were cancelled; return what each
    node said. Raises BrokerAway."""
    return await _ask_each(bus, subjects.WAITING_WITHDRAW, selection, WithdrawAnswer)


async def withdraw_one(
    bus: Bus, request: str, *, tenant: str | None = None
) -> Asked[WithdrawAnswer]:
    """Let one request wait no more; return what its node said, also where it had it withdrawn
    before. Raises BrokerAway."""
    answers = await _ask_each(
        bus,
        subjects.WAITING_WITHDRAW,
        Selection(request=request, tenant=tenant),
        WithdrawAnswer,
        enough=_had_it,
    )
    return Asked(len(answers), next(filter(_had_it, answers), None))


def _has_it(answer: FindAnswer) -> bool:
    return answer.place is not None


def _had_it(answer: WithdrawAnswer) -> bool:
    return answer.withdrawn > 0 or answer.before


async def _ask_each(
    bus: Bus,
    subject: str,
    question: msgspec.Struct,
    kind: type[T],
    *,
    enough: Callable[[T], bool] = lambda answer: False,
) -> list[T]:
    """Return the answers that came in time, up to one that is enough; those that cannot be read
    count as none. Raises BrokerAway."""
    answers: asyncio.Queue[Message] = asyncio.Queue()

    async def put(message: Message) -> None:
        answers.put_nowait(message)

    found: list[T] = []
    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox, put)
    try:
        await bus.publish(subject, msgspec.json.encode(question), reply=inbox)
        with suppress(TimeoutError, NobodyAnswers):
            async with asyncio.timeout(ANSWER_S):
                while not (found and enough(found[-1])):
                    answer = await answers.get()
                    raise_no_responders(answer)
                    with suppress(msgspec.MsgspecError):
                        found.append(msgspec.json.decode(answer.data, type=kind))
    finally:
        await subscription.unsubscribe()
    return found
