"""Tells ingress what an ended request has used, so that the rest of its reservation comes back.

A message that is lost costs its tenant nothing for good: reservations expire soon after their
requests' deadlines.
"""

import msgspec

from headrace.bus import Bus
from schemas import subjects
from schemas.subjects import Settlement
from schemas.wire import Envelope, Usage

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Settlement).decode


async def settle(bus: Bus, settlement: Settlement) -> None:
    """Tell one of the ingress nodes. Raises BrokerAway."""
    await bus.publish(subjects.SETTLEMENTS, _encode(settlement))


async def settle_unrun(bus: Bus, *, tenant: str, request: str) -> None:
    """Tell them that a request will never run. Raises BrokerAway."""
    await settle(bus, Settlement(tenant, request, ""))


def settlement_of(envelope: Envelope, usage: Usage, *, ran: bool = True) -> Settlement:
    """Return what an ended request has used: nothing where no engine heard of it (`ran`)."""
    return Settlement(
        envelope.tenant,
        envelope.request,
        envelope.model,
        usage.prompt_tokens if ran or usage.completion_tokens else None,
        usage.completion_tokens,
    )


def read_settlement(data: bytes) -> Settlement:
    """Read such a message. Raises msgspec.MsgspecError."""
    return _decode(data)
