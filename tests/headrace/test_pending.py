"""Questions do not outlive their connection; work waits for the broker and is tried until done."""

import asyncio

import pytest

from headrace.messages import BrokerAway, BrokerRefused
from headrace.pending import Answers, Errands
from tests.waiting import until


def test_an_answer_that_is_done_or_given_up_is_forgotten() -> None:
    async def test() -> None:
        answers = Answers()
        _, first = answers.expect()
        _, second = answers.expect()
        first.cancel()
        await until(lambda: len(answers._waiting) == 1)
        answers.fail("the connection broke")
        with pytest.raises(BrokerAway, match="broke"):
            await second
        await until(lambda: not answers._waiting)

    asyncio.run(test())


def test_work_after_a_return_is_tried_until_the_broker_takes_it() -> None:
    async def test() -> None:
        failures = [BrokerAway("no leader"), BrokerRefused("not yet", code=10008, status=503)]
        done: list[int] = []

        async def work() -> None:
            if failures:
                raise failures.pop()
            done.append(1)

        errands = Errands(lambda: True)
        errands.after_return(work)
        errands.returned()
        await until(lambda: done == [1])

    asyncio.run(test())


def test_work_is_given_up_when_the_connection_breaks_again() -> None:
    async def test() -> None:
        connected = True
        tries: list[int] = []

        async def work() -> None:
            tries.append(1)
            raise BrokerAway("gone")

        errands = Errands(lambda: connected)
        errands.after_return(work)
        errands.returned()
        await until(lambda: tries)
        connected = False
        await until(lambda: not errands._tasks)

    asyncio.run(test())
