"""Puts a request into the queue. Rule: it is accepted once the broker has said so, not before."""

import logging
import time
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.cancel import cancel_surely
from headrace.deadline import time_to_live
from schemas import subjects
from schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    QueueFull,
    QueueTimeout,
    RequestTooLarge,
)
from schemas.subjects import RequestSubject
from schemas.wire import Envelope, encode_envelope

log = logging.getLogger(__name__)

ACCEPT_TIMEOUT_S: Final = 30.0
_STORE_FAILED: Final = 10077  # a limit of the stream, named in the description
_HEADER_BYTES: Final = 256  # ids, time to live, and the protocol's own line


async def dispatch(bus: Bus, subject: RequestSubject, envelope: Envelope) -> None:
    """Publish a request and wait for the broker's word.

    Raises RequestTooLarge, QueueFull, QueueTimeout, DeadlineExceeded or BrokerUnavailable; nothing
    stays in the queue then, as far as the broker can be told, that a worker would start.
    """
    data = encode_envelope(envelope)
    if len(data) + _HEADER_BYTES > bus.payload_bytes_max:
        raise RequestTooLarge(
            f"The prompt takes {len(data)} bytes in the queue;"
            f" the broker's limit is {bus.payload_bytes_max} bytes a message."
        )
    headers = {
        "Nats-Msg-Id": subjects.message_id(envelope.request, 1),
        **time_to_live(envelope.deadline_s),
    }
    left_s = envelope.deadline_s - time.time()
    if left_s <= 0:
        raise _too_late()
    started_s = time.monotonic()
    timeout_s = min(ACCEPT_TIMEOUT_S, left_s)
    try:
        await bus.store(str(subject), data, headers=headers, timeout_s=timeout_s)
    except BrokerRefused as error:
        if error.code == _STORE_FAILED:
            raise QueueFull("The queue is full; try again later.") from error
        log.error("the broker refuses requests: %s", error)
        raise BrokerUnavailable("The queue refuses requests.") from error
    except BrokerAway as error:
        if time.time() >= envelope.deadline_s:
            raise _too_late() from error  # no worker starts it now, so nothing is to be taken back
        await _take_back(bus, envelope)
        if time.time() >= envelope.deadline_s:
            raise _too_late() from error
        if time.monotonic() - started_s >= ACCEPT_TIMEOUT_S:
            raise QueueTimeout("The queue did not take the request in time.") from error
        raise BrokerUnavailable("The queue cannot be reached.") from error


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("The request's deadline passed before the queue had taken it.")


async def _take_back(bus: Bus, envelope: Envelope) -> None:
    """Make sure that a request whose fate is unknown does not run without a reader."""
    try:
        await cancel_surely(bus, tenant=envelope.tenant, request=envelope.request)
    except (BrokerAway, BrokerRefused) as error:
        log.info("%s may be in the queue until the broker is back: %s", envelope.request, error)
