"""What an ack subject tells of a delivery, and what in the queue is nobody's request."""

import asyncio
import os
import signal
from collections.abc import Coroutine

import pytest

from headrace import topology
from headrace.bus import BrokerAway, Bus, Message
from schemas.model import ModelCard
from schemas.subjects import RequestSubject, new_request_id
from tests.broker import answers, with_bus
from tests.servers import NatsServer, freeze
from tests.waiting import until
from workers.credit import Place
from workers.intake import Intake, deliveries


@pytest.mark.parametrize(
    ("ack", "told"),
    [
        ("$JS.ACK.REQUESTS.online-m-0.1.7.9.1700000000500000000.3", (1, 1700000000.5)),
        ("$JS.ACK._.ABC.REQUESTS.online-m-0.4.7.9.1700000000500000000.3.tok", (4, 1700000000.5)),
        ("_INBOX.x", (0, 0.0)),
        ("$JS.ACK.REQUESTS.online-m-0.x.7.9.y.3", (0, 0.0)),
    ],
)
def test_an_ack_subject_tells_the_count_and_when_it_was_stored(
    ack: str, told: tuple[int, float]
) -> None:
    assert deliveries(ack) == told


async def _intake(bus: Bus) -> Intake:
    await topology.apply(bus)
    card = ModelCard(name="sim", created_s=1, max_model_len=100, files={})
    await topology.apply_model(bus, card.name, partitions=card.partitions)

    async def deliver(subject: RequestSubject, message: Message) -> None:
        raise AssertionError(f"{subject} is no request")

    return Intake(bus, card, slots=1, held=lambda: 0, deliver=deliver)


async def _while_running(
    work: Coroutine[None, None, None], fact: Coroutine[None, None, object]
) -> None:
    """Wait for a fact; raise what ends the work before."""
    tasks = [asyncio.create_task(each) for each in (work, fact)]
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    for task in done:
        task.result()
    assert tasks[1] in done


@pytest.mark.parametrize(
    "foreign",
    ["requests.interactive.sim.0.t.x", "requests.online.sim.zero.t.x", "requests.online.sim.1.=.x"],
)
def test_a_foreign_subject_does_not_end_the_look_at_the_queue(
    own_nats: NatsServer, foreign: str
) -> None:
    async def test(bus: Bus) -> None:
        intake = await _intake(bus)
        await bus.store(foreign, b"x")
        await bus.store(str(RequestSubject("online", "sim", 3, "t", new_request_id())), b"x")
        found = frozenset({Place("online", 3)})
        await _while_running(intake.look_forever(), until(lambda: intake.credits.waiting == found))

    with_bus(own_nats.url, test)


@pytest.mark.slow
def test_the_queue_is_looked_at_again_soon_after_a_look_that_nobody_answered(
    own_nats: NatsServer,
) -> None:
    async def test(bus: Bus) -> None:
        intake = await _intake(bus)

        async def is_found() -> None:
            freeze(own_nats.pid)
            try:
                with pytest.raises(BrokerAway):
                    await bus.api("STREAM.INFO.REQUESTS")
            finally:
                os.kill(own_nats.pid, signal.SIGCONT)
            await until(lambda: answers(bus))
            await bus.store(str(RequestSubject("online", "sim", 3, "t", new_request_id())), b"x")
            await until(lambda: intake.credits.waiting)

        await _while_running(intake.look_forever(), is_found())

    with_bus(own_nats.url, test)


def test_a_foreign_subject_in_a_partition_leaves_the_queue(own_nats: NatsServer) -> None:
    async def test(bus: Bus) -> None:
        intake = await _intake(bus)
        await bus.store("requests.online.sim.3.t.x.y", b"x")
        await intake.start()

        async def is_empty() -> bool:
            info = await bus.api("STREAM.INFO.REQUESTS")
            return not info["state"]["messages"]

        await _while_running(intake.pump(), until(is_empty))

    with_bus(own_nats.url, test)
