"""Puts a request into the queue. Rule: it is accepted once the broker has said so, not before."""

import logging
import math
import time
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.cancel import cancel_surely
from schemas import subjects
from schemas.errors import BrokerUnavailable, QueueFull, QueueTimeout, RequestTooLarge
from schemas.subjects import RequestSubject
from schemas.wire import Envelope, encode_envelope

log = logging.getLogger(__name__)

ACCEPT_TIMEOUT_S: Final = 30.0
_STORE_FAILED: Final = 10077  # a limit of the stream, named in the description
_HEADER_BYTES: Final = 256  # ids, time to live, and the protocol's own line


async def dispatch(bus: Bus, subject: RequestSubject, envelope: Envelope) -> None:
    """Publish a request and wait for the broker's word.

    Raises RequestTooLarge, QueueFull, QueueTimeout or BrokerUnavailable; nothing stays in the queue
    then, as far as the broker can be told.
    """
    data = encode_envelope(envelope)
    if len(data) + _HEADER_BYTES > bus.payload_bytes_max:
        raise RequestTooLarge(
            f"The prompt takes {len(data)} bytes in the queue;"
            f" the broker's limit is {bus.payload_bytes_max} bytes a message."
        )
    headers = {
        "Nats-Msg-Id": subjects.message_id(envelope.request, 1),
        "Nats-TTL": str(max(1, math.ceil(envelope.deadline_s - time.time()))),
    }
    started_s = time.monotonic()
    try:
        await bus.store(str(subject), data, headers=headers, timeout_s=ACCEPT_TIMEOUT_S)
    except BrokerRefused as error:
        if error.code == _STORE_FAILED:
            raise QueueFull("The queue is full; try again later.") from error
        log.error("the broker refuses requests: %s", error)
        raise BrokerUnavailable("The queue refuses requests.") from error
    except BrokerAway as error:
        await _take_back(bus, envelope)
        if time.monotonic() - started_s >= ACCEPT_TIMEOUT_S:
            raise QueueTimeout("The queue did not take the request in time.") from error
        raise BrokerUnavailable("The queue cannot be reached.") from error


async def _take_back(bus: Bus, envelope: Envelope) -> None:
    """Make sure that a request whose fate is unknown does not run without a reader."""
    try:
        await cancel_surely(bus, tenant=envelope.tenant, request=envelope.request)
    except (BrokerAway, BrokerRefused) as error:
        log.info("%s may be in the queue until the broker is back: %s", envelope.request, error)
