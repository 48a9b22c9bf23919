"""What a worker does when a stream was made anew under what it runs. Rule: what runs, runs on.

The new queue does not hold it and the new log knows nothing of it: both are told, so that it
survives this worker's death again, and so that who is given it finds who has it.
"""

import logging
import math
import time
from collections.abc import Iterable
from typing import Final

from headrace.bus import BrokerRefused, Bus
from headrace.upkeep import Upkeep
from schemas import subjects
from schemas.wire import encode_envelope
from workers.generation import Generation
from workers.intake import AGAIN
from workers.worker import Worker

log = logging.getLogger(__name__)

_WRONG_LAST_SEQUENCE: Final = 10071


def attend(upkeep: Upkeep, bus: Bus, worker: Worker) -> None:
    """Have what a worker runs survive streams that are made anew."""

    async def queue_remade() -> None:
        worker.intake.doubt()
        await put_back(bus, worker.generations)

    async def log_remade() -> None:
        await announce_again(worker.generations)

    upkeep.on_remade(subjects.REQUESTS, queue_remade)
    upkeep.on_remade(subjects.REPLIES, log_remade)


async def put_back(bus: Bus, generations: Iterable[Generation]) -> None:
    """Put what is held into the queue again. Raises BrokerAway and BrokerRefused."""
    count = 0
    for generation in generations:
        envelope = generation.envelope
        if generation.cancelled.is_set() or generation.lost:
            continue
        headers = {
            AGAIN: "1",
            "Nats-Expected-Last-Subject-Sequence": "0",
            "Nats-TTL": str(max(1, math.ceil(envelope.deadline_s - time.time()))),
        }
        try:
            await bus.store(generation.place, encode_envelope(envelope), headers=headers)
            count += 1
        except BrokerRefused as error:
            if error.code != _WRONG_LAST_SEQUENCE:
                raise
    if count:
        log.warning("%d requests that run here were put into the new queue", count)


async def announce_again(generations: Iterable[Generation]) -> None:
    """Begin the logs of what runs anew. Raises BrokerAway and BrokerRefused."""
    for generation in generations:
        await generation.announce_again()
