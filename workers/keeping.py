"""Keeps the answer of a request that has ended. Rule: before the request is acknowledged, so that
a worker which dies in between is followed by one that does it.

What is kept is the log without its repeats: one claim, each piece once, the end. Pieces stay as
they are: an event's id is the seq of its piece's last token.
"""

import logging
from typing import Final

from headrace.bus import BrokerRefused, Bus
from headrace.kept import keep
from schemas.wire import Envelope, Failed, Finished, Started, Tokens, encode_frame, span
from workers.history import History, read_history
from workers.recovery import read_log

log = logging.getLogger(__name__)

FRAME_PIECES: Final = 256


async def keep_answer(bus: Bus, envelope: Envelope) -> None:
    """Store the answer of a request that has ended, where that is asked for. Raises BrokerAway.

    An answer that the broker refuses to store is not kept: trying for ever would not help.
    """
    if not envelope.keep_answer:
        return
    request = envelope.request
    try:
        frames = compact(read_history(await read_log(bus, envelope.reply)))
        if frames is None:
            log.warning("%s: its log is not whole, so its answer is not kept", request)
            return
        await keep(bus, tenant=envelope.tenant, request=request, frames=frames)
    except BrokerRefused as error:
        log.error("%s: its answer is not kept: %s", request, error)


def compact(history: History) -> list[bytes] | None:
    """Return the frames that tell an ended history shortest; None for one that is not whole."""
    shape, end, pieces = history.shape, history.end, history.pieces
    if shape is None or end is None or history.next_seq != end.seq + span(end.pieces):
        return None
    frames: list[Started | Tokens | Finished | Failed]
    frames = [Started(end.attempt, history.holder or "", 0, shape)]
    seq = 0
    for start in range(0, len(pieces), FRAME_PIECES):
        part = pieces[start : start + FRAME_PIECES]
        frames.append(Tokens(end.attempt, seq, part))
        seq += span(part)
    frames.append(end._replace(seq=seq, pieces=()))
    return [encode_frame(frame) for frame in frames]
