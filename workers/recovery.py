"""Whose is a request that was delivered again? Rule: redelivery is a question, not an order.

A broker that was away, or a killed leader, delivers all that runs again although its holders live.
The log names the last holder; it is asked, and if it still holds the request it takes over the new
delivery's ack subject and goes on.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace import journal
from headrace.bus import BrokerAway, Bus
from schemas import subjects
from schemas.wire import BadFrame, Failed, Finished, Started, Tokens, decode_frame

HOLDS_TIMEOUT_S: Final = 0.15


class HoldsQuestion(msgspec.Struct, frozen=True):
    """Do you hold this request? If so, here is its new ack subject."""

    request: str
    ack: str


@dataclass(frozen=True, slots=True)
class History:
    """What the log says of a request."""

    ended: bool
    tokens: int
    starts: int
    holder: str | None


async def read_history(bus: Bus, reply: str) -> History:
    """Read a request's log. Raises BrokerAway and BrokerRefused."""
    ended, tokens, starts, holder = False, 0, 0, None
    for entry in await journal.read(bus, subjects.REPLIES, reply):
        try:
            frame = decode_frame(entry.data)
        except BadFrame:
            continue
        match frame:
            case Started(_, worker):
                starts += 1
                holder = worker
            case Tokens(_, seq, pieces):
                tokens = max(tokens, seq + sum(len(piece.tokens) for piece in pieces))
            case Finished() | Failed():
                ended = True
    return History(ended, tokens, starts, holder)


async def is_held(bus: Bus, worker: str, *, request: str, ack: str) -> bool:
    """Ask a worker whether it holds a request; silence is a no."""
    question = msgspec.json.encode(HoldsQuestion(request, ack))
    try:
        async with asyncio.timeout(HOLDS_TIMEOUT_S):
            answer = await bus.request(
                subjects.worker_holds(worker), question, timeout_s=HOLDS_TIMEOUT_S
            )
    except (BrokerAway, TimeoutError):
        return False
    return answer == b"yes"
