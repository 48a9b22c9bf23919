"""Tells ingress what an ended request has used, so that the rest of its reservation comes back.

A message that is lost costs its tenant nothing for good: reservations expire soon after their
requests' deadlines.
"""

import msgspec

from headrace.bus import Bus
from schemas import subjects
from schemas.subjects import Settlement

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Settlement).decode


async def settle(bus: Bus, settlement: Settlement) -> None:
    """Tell one of the ingress nodes. Raises BrokerAway."""
    await bus.publish(subjects.SETTLEMENTS, _encode(settlement))


def read_settlement(data: bytes) -> Settlement:
    """Read such a message. Raises msgspec.MsgspecError."""
    return _decode(data)
