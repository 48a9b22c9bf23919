"""Who asks a worker whether it holds a request: what is silence, and what is not."""

import asyncio
import time

from headrace.bus import Bus, Message
from schemas import subjects
from tests.broker import with_bus
from workers.recovery import SILENCE_S, is_held


def test_a_holder_is_not_silent_because_its_machine_stood_still_while_it_was_asked(
    nats_url: str,
) -> None:
    async def test(bus: Bus) -> None:
        async def yes(message: Message) -> None:
            await bus.publish(message.reply, b"yes")

        await bus.subscribe(subjects.worker_holds("still"), yes)
        asked = asyncio.create_task(
            is_held(bus, "still", request="r", ack="a", heard_s=time.monotonic())
        )
        await asyncio.sleep(0)
        time.sleep(SILENCE_S)  # noqa: ASYNC251 - both of them
        assert await asked

    with_bus(nats_url, test)


def test_a_holder_that_never_answers_holds_nothing(nats_url: str) -> None:
    async def test(bus: Bus) -> None:
        async def nothing(message: Message) -> None:
            pass

        await bus.subscribe(subjects.worker_holds("hung"), nothing)
        assert not await is_held(bus, "hung", request="r", ack="a", heard_s=time.monotonic())

    with_bus(nats_url, test)
