"""Whose is a request that was delivered again, and where does it go on? Rule: redelivery is a
question, not an order; what is heard goes to `course`, which decides.

A broker that was away, or a killed leader, delivers all that runs again although its holders live.
The log names the last holder; it is asked, and if it still holds the request it takes over the new
delivery's ack subject and goes on. Silence or a no: this worker claims the request and goes on
after the last token of the log, or after what the streamer has shown beyond it.
"""

import asyncio
import logging
import time
from typing import Final

import msgspec

from headrace import journal
from headrace.bus import BrokerAway, Bus
from headrace.messages import NobodyAnswers
from schemas import subjects
from schemas.subjects import ReplySubject
from schemas.wire import BadFrame, Envelope, Frame, Tokens, decode_frame
from workers.course import Recovery, Shown, course_of
from workers.history import History, read_history

log = logging.getLogger(__name__)

HOLDS_TIMEOUT_S: Final = 0.15
SILENCES_MAX: Final = 3
"""Questions that a holder leaves unanswered, for 0.65 s in all."""
RECONNECT_S: Final = 2.0
"""What a holder may take to find the broker that has just come back."""
ASK_AGAIN_S: Final = 0.1
SHOWN_TIMEOUT_S: Final = 0.3


async def read_log(bus: Bus, reply: str) -> list[tuple[int, Frame]]:
    """Read a request's frames with their sequences. Raises BrokerAway and BrokerRefused."""
    frames = []
    for entry in await journal.read(bus, subjects.REPLIES, reply):
        try:
            frames.append((entry.seq, decode_frame(entry.data)))
        except BadFrame as error:
            log.warning("%s: a frame in the log that we cannot read: %s", reply, error)
    return frames


async def is_held(bus: Bus, worker: str, *, request: str, ack: str, heard_s: float) -> bool:
    """Ask a worker whether it holds a request; silence is a no.

    After an outage all that runs is delivered again, to whoever is back first: one that nobody
    hears although its heartbeat was heard at `heard_s`, or before we came back ourselves, is given
    time to reconnect. Patience is counted in questions: who asks may stand still itself, with all
    of its machine.
    """
    question = msgspec.json.encode(subjects.HoldsQuestion(request, ack))
    subject = subjects.worker_holds(worker)
    reconnect_s = max(bus.returned_s, heard_s) + RECONNECT_S - time.monotonic()
    unheard = silent = 0
    while True:
        try:
            return await bus.request(subject, question, timeout_s=HOLDS_TIMEOUT_S) == b"yes"
        except NobodyAnswers:
            unheard += 1
            if unheard * ASK_AGAIN_S > reconnect_s:
                return False
        except BrokerAway:
            silent += 1
            if silent >= SILENCES_MAX or not bus.connected:
                return False
        await asyncio.sleep(ASK_AGAIN_S)


async def past_of(bus: Bus, envelope: Envelope, *, attempt: int | None = None) -> History:
    """Read what the log says of a request, before the reader's own claim if there is one.

    Raises BrokerAway and BrokerRefused.
    """
    return read_history(await read_log(bus, envelope.reply), attempt=attempt)


async def recover(bus: Bus, envelope: Envelope, history: History) -> Recovery:
    """Find out how a request goes on that this worker has claimed."""
    shown = await ask_shown(bus, envelope, have=history.next_seq)
    return course_of(envelope, history, shown)


async def ask_shown(bus: Bus, envelope: Envelope, *, have: int) -> Shown | None:
    """Ask who reads a reply what was shown of it beyond `have`: the streamer that the request came
    through, and one that it was resumed at; None where neither answers."""
    reply = ReplySubject.parse(envelope.reply)
    question = msgspec.json.encode(subjects.ShownQuestion(envelope.request, have))
    answers = await asyncio.gather(
        _shown_at(bus, subjects.streamer_shown(reply.streamer), question),
        _shown_at(bus, subjects.readers_of(tenant=reply.tenant, request=reply.request), question),
    )
    heard = [answer for answer in answers if answer is not None]
    if not heard:
        log.info("%s: nobody says what was shown of it", envelope.request)
    return max(heard, key=lambda shown: shown.next_seq, default=None)


async def _shown_at(bus: Bus, subject: str, question: bytes) -> Shown | None:
    try:
        answer = await bus.request(subject, question, timeout_s=SHOWN_TIMEOUT_S)
        frame = decode_frame(answer) if answer else None
    except (BrokerAway, BadFrame):
        return None
    # `attempt` carries how far the client has seen: the frame is no part of any attempt.
    return Shown(frame.attempt, frame.pieces) if isinstance(frame, Tokens) else None


async def was_seen(bus: Bus, envelope: Envelope) -> bool:
    """Ask whether a client has seen tokens that the log does not hold any more."""
    shown = await ask_shown(bus, envelope, have=0)
    return shown is not None and shown.next_seq > 0
