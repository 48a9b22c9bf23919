"""Who asks a worker whether it holds a request: what is silence, and what is not."""

import asyncio
import time

from headrace.bus import Bus, Message
from schemas import subjects
from tests.broker import with_bus
from tests.waiting import until
from workers.recovery import RECONNECT_S, SILENCES_MAX, is_held


def test_a_holder_is_asked_again_where_its_whole_machine_stood_still_while_it_was_asked(
    nats_url: str,
) -> None:
    async def test(bus: Bus) -> None:
        questions: list[bytes] = []

        async def silent(message: Message) -> None:
            questions.append(message.data)

        await bus.subscribe(subjects.worker_holds("still"), silent)
        asked = asyncio.create_task(
            is_held(bus, "still", request="r", ack="a", heard_s=time.monotonic())
        )
        await asyncio.sleep(0)
        time.sleep(1)  # noqa: ASYNC251 - both of them
        assert not await asked
        await until(lambda: len(questions) == SILENCES_MAX)

    with_bus(nats_url, test)


def test_a_holder_that_has_long_been_gone_holds_nothing(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        long_ago_s = time.monotonic() - RECONNECT_S
        assert not await is_held(bus, "dead", request="r", ack="a", heard_s=long_ago_s)

    with_bus(nats_url, test)
