"""What one client has yet to read, and when the log must be read for it.

Rule: memory per client is bounded. A reader that falls behind loses its buffer, never its place:
what was dropped is read again from REPLIES once the reader has caught up with the rest.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from headrace import journal
from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.connection import Connection
from headrace.workforce import no_workers
from schemas import subjects
from schemas.errors import DeadlineExceeded, Refusal, StreamInterrupted
from schemas.reply import Event, Reply, Shown
from schemas.wire import BadFrame, Keepalive, Tokens, decode_frame
from streamer.recent import Recent

log = logging.getLogger(__name__)

BUFFER_BYTES_MAX: Final = 128 * 1024
EVENT_BYTES: Final = 128
"""What an event takes beside its frame's bytes: a token of few letters is mostly that."""
PAGE_BYTES_MAX: Final = 64 * 1024
QUIET_READ_S: Final = 15.0
COMMENT_S: Final = 14.0
HOLE_READ_S: Final = 0.25
LATE_READ_S: Final = 0.25
HOLE_S_MAX: Final = 10.0
STALLED_S_MAX: Final = 60.0
DEADLINE_GRACE_S: Final = 1.0


class OpenReply:
    """A reply on its way to one client. The mailbox feeds it, one task reads it."""

    # So many in a dictionary take 1.3 KiB more.
    __slots__ = (  # noqa: SIM905
        "model _serves tenant request log_subject deadline_s reply refusal left "
        "comment_due opening_due tokens heard_on lingers queued absences asked_s _bus "
        "_kept _bytes_max _pending _pending_bytes _behind _begun _log_due _log_failed "
        "_log_seq _given _waiter _abandoned _heard_s _quiet_read_s _late _sent_s _sending "
        "_unsent_bytes _hole_s _hole_seq _recent _rest write_now writer connection "
        "stalled __weakref__"
    ).split()

    def __init__(
        self,
        bus: Bus,
        *,
        tenant: str,
        request: str,
        log_subject: str,
        deadline_s: float,
        now_s: float,
        keep: bool = False,
        model: str = "",
        serves: Callable[[str], bool] = lambda model: True,
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
    ) -> None:
        """`serves` tells whether a worker serves a model; `model` is empty while it is unknown."""
        self.model = model
        self._serves = serves
        self.tenant = tenant
        self.request = request
        self.log_subject = log_subject
        self.deadline_s = deadline_s
        self.reply = Reply()
        self.refusal: Refusal | None = None
        self.left = False
        self.comment_due = False
        self.opening_due = False
        self.tokens = 0
        self.heard_on: str | None = None  # the subject of its frames, which names its streamer
        self.lingers = False  # whether its client may come back in a moment
        self.queued = True  # or it waits in ingress for its turn
        self.absences = 0
        self.asked_s = now_s
        self._bus = bus
        self._kept = keep
        self._bytes_max = buffer_bytes_max
        self._pending: list[Event] = []
        self._pending_bytes = 0
        self._behind = False
        self._begun = False  # whether the reader was told so
        self._log_due = False
        self._log_failed = False
        self._log_seq = 0
        self._given: deque[bytes] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._abandoned: asyncio.Future[None] | None = None
        self._heard_s = now_s
        self._quiet_read_s = now_s
        self._late = False
        self._sent_s = now_s
        self._sending = False
        self._unsent_bytes = 0
        self._hole_s: float | None = None
        self._hole_seq = 0
        self._recent = Recent()
        self._rest: Awaitable[None] | None = None
        self.write_now: Callable[[Sequence[Event]], Awaitable[None] | None] | None = None
        self.writer: asyncio.Task[None] | None = None
        self.connection: Connection | None = None
        self.stalled = False

    @property
    def waits(self) -> bool:
        """Whether its end is neither known nor in what the log may hold unread."""
        settled = self.reply.ended or self.refusal is not None or self.left
        return not (settled or self._sending or self._log_failed or self._pending)

    def now_queued(self, *, now_s: float) -> None:
        """Note that its request, which had to wait for its turn, is in the queue."""
        self.queued = True
        self.asked_s = now_s

    @property
    def kept(self) -> bool:
        """Whether nothing is to be ended when the last reader leaves."""
        if self._given is not None:
            return True
        shape = self.reply.shape
        return self._kept if shape is None else shape.keep

    def frame(self, data: bytes) -> None:
        """Take a frame as it came from the broker."""
        self._heard_s = 0.0  # the next tick sets it: a clock read per frame would cost more
        if self._behind:
            return
        events = self._read(data, stored_seq=None)
        if not events:
            self._note_opening()
            return
        self._recent.add(data)
        if self._written(events):
            return
        self._keep(events, len(data))
        if self._pending_bytes > self._bytes_max:
            self._behind = True
        self._wake()

    def _read(self, data: bytes, *, stored_seq: int | None) -> Sequence[Event]:
        try:
            return self.reply.take(decode_frame(data), stored_seq=stored_seq)
        except BadFrame as error:
            log.warning("a frame of %s that we cannot read: %s", self.request, error)
            return ()

    def _note_opening(self) -> None:
        """Wake the reader if its client is to be told that the reply has begun."""
        shape = self.reply.shape
        if shape is not None and shape.endpoint == "response" and not self._begun:
            self.opening_due = self._begun = True
            self._wake()

    def _keep(self, events: Sequence[Event], size: int) -> None:
        self._pending.extend(events)
        self._pending_bytes += size + EVENT_BYTES * len(events)

    def _written(self, events: Sequence[Event]) -> bool:
        """Write tokens at once if the reader waits for nothing else; tell whether it was done."""
        if (
            self.write_now is None
            or self._waiter is None
            or self._waiter.done()
            or self._pending
            or type(events[-1]) is not Shown
        ):
            return False
        self.tokens += len(events)
        self._rest = self.write_now(events)
        if self._rest is not None:
            self._wake()  # the reader waits for the rest of this write
        return True

    def wrote(self) -> None:
        """Note that something was written: tokens whose text is held back are quiet too."""
        self._sent_s = 0.0

    async def next(self) -> list[Event]:
        """Wait for events and return all there are; none when something else is to be looked at:
        `left`, `refusal`, `comment_due` or `opening_due`."""
        while True:
            if self._rest is not None:
                self.sending()
                rest, self._rest = self._rest, None
                await rest
                self.sent()
            if self._log_due:
                await self._read_log()
            if self._pending and self.reply.shape is not None:
                events, self._pending, self._pending_bytes = self._pending, [], 0
                self._log_due = self._behind
                self.tokens += len(events)
                return events
            if self._behind:
                self._log_due = True
                continue
            if self.left or self.refusal is not None or self.comment_due or self.opening_due:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def look(self) -> bool:
        """Tell whether there are events already: then `next` does not wait."""
        while not self._pending and (self._log_due or self._behind):
            await self._read_log()
        return bool(self._pending) and self.reply.shape is not None

    async def load(self) -> None:
        """Read what the log holds already, before anybody waits for it.

        Raises BrokerAway: a log that cannot be read is not an empty one.
        """
        await self._read_log()
        if self._log_failed:
            raise BrokerAway(f"the log of {self.request} cannot be read")

    def keep(self, keep: bool) -> None:
        """Note whether the request runs on without readers, before a worker has told."""
        self._kept = keep

    def came_late(self, *, now_s: float) -> None:
        """Have the log read again in a moment: its last frame may have been told to others before
        we listened, and stored after we read."""
        self._heard_s = self._quiet_read_s = now_s - QUIET_READ_S + LATE_READ_S

    def give(self, frames: Iterable[bytes]) -> None:
        """Take the frames of an ended reply in place of its log, which is no more there."""
        self._given = deque(frames)
        self.deadline_s = math.inf
        self.look_at_log()

    async def _read_log(self) -> None:
        was_behind = self._behind
        self._log_due = self._behind = self._log_failed = False
        if self._given is not None:
            self._take_given(self._given)
            return
        try:
            entries, more = await journal.read_page(
                self._bus,
                subjects.REPLIES,
                self.log_subject,
                after_seq=self._log_seq,
                bytes_max=min(self._bytes_max, PAGE_BYTES_MAX),
            )
        except (BrokerAway, BrokerRefused) as error:
            log.debug("the log of %s cannot be read now: %s", self.request, error)
            self._log_failed = True
            return
        for entry in entries:
            self._keep(self._read(entry.data, stored_seq=entry.seq), len(entry.data))
            self._log_seq, self.heard_on = entry.seq, entry.subject
        self._late = was_behind and not more  # what was dropped last may be stored in a moment
        self._behind |= more  # the rest is read once this has been: a reply may be long
        self._note_opening()

    def _take_given(self, frames: deque[bytes]) -> None:
        while frames and self._pending_bytes <= self._bytes_max:
            data = frames.popleft()
            self._keep(self._read(data, stored_seq=None), len(data))
        self._behind = bool(frames)

    def shown(self, have: int) -> Tokens:
        """Return the pieces from seq `have` on that the client has or will be given, as far as
        they are at hand, in a frame whose `attempt` is the seq after the last of them."""
        return self._recent.shown(have, next_seq=self.reply.next_seq)

    def sending(self) -> None:
        """Note that a write begins."""
        self._sending = True
        self._sent_s = 0.0  # a stall is counted from here, not from the last write's end

    def sent(self) -> None:
        """Note that the write is done."""
        self._sending = False
        self._sent_s = 0.0
        self.comment_due = False

    def quiet_s(self, *, now_s: float) -> float:
        """How long nothing has been heard of the reply."""
        return now_s - (self._heard_s or now_s)

    def leave(self) -> None:
        """Note that the client is gone."""
        self.left = True
        self._abandon()

    def release(self) -> None:
        """Hold nothing that holds this reply, which has ended: else all of it would stay until the
        garbage collector's next long look, which is thousands of requests away."""
        self.write_now = self.writer = self.connection = None

    def refuse(self, refusal: Refusal) -> None:
        """End the reply with an error, after what is pending."""
        if self.refusal is None and not self.reply.ended:
            self.refusal = refusal
            self._abandon()

    async def abandoned(self) -> None:
        """Return once nobody waits for the reply: its client has left, or it was refused."""
        if not self.left and self.refusal is None:
            self._abandoned = asyncio.get_running_loop().create_future()
            await self._abandoned

    def look_at_log(self) -> None:
        """Have the log read."""
        self._log_due = True
        self._wake()

    def reconnected(self) -> None:
        """Have the log read: the connection to the broker was broken."""
        self._hole_s = None  # what is missing has its full time from now on
        self.look_at_log()

    def begun_without(self, last_seq: int) -> None:
        """Note that the reply was heard up to here before it was opened: all that is in the log, or
        will be in a moment, since the broker may tell us of a frame before it has stored it."""
        self.reply.take(Keepalive(0, last_seq))
        self.look_at_log()

    def tick(self, *, now_s: float, wall_s: float) -> None:
        """Notice silence, holes, stalls and the deadline; called a few times a second."""
        self._heard_s = self._heard_s or now_s
        self._sent_s = self._sent_s or now_s
        if self._sending:
            self._tick_stall(now_s)
            return
        # A worker that runs it writes the end itself; nobody does of what waits in the queue.
        grace_s = DEADLINE_GRACE_S if self.reply.started else 0.0
        if wall_s > self.deadline_s + grace_s:
            self.refuse(self._too_late())
        if now_s - self._sent_s > COMMENT_S:
            self.comment_due = True
            self._wake()
        self._tick_log(now_s)

    def _too_late(self) -> Refusal:
        if self.model and not self._serves(self.model):
            return no_workers(self.model)
        return DeadlineExceeded("The request's deadline has passed.")

    def _tick_stall(self, now_s: float) -> None:
        """Have the writer cancelled, once, when its client has taken nothing for a while."""
        unsent_bytes = 0 if self.connection is None else self.connection.unsent_bytes
        if unsent_bytes < self._unsent_bytes:
            self._sent_s = now_s  # slow, but it reads
        self._unsent_bytes = unsent_bytes
        if now_s - self._sent_s > STALLED_S_MAX and self.writer is not None and not self.stalled:
            self.stalled = True
            self.refuse(StreamInterrupted("The client did not read for long; resume the stream."))
            self.writer.cancel("the client does not read")

    def _tick_log(self, now_s: float) -> None:
        if self._late:
            self._late = False
            self.came_late(now_s=now_s)
        if self._log_failed and self._bus.connected:
            self.look_at_log()
        if not self.reply.missing and (self.reply.started or not self._pending):
            self._hole_s = None
            if now_s - max(self._heard_s, self._quiet_read_s) > QUIET_READ_S:
                self._quiet_read_s = now_s
                self.look_at_log()
            return
        if self._hole_s is None or self._hole_seq != self.reply.next_seq:  # it is another one
            self._hole_s, self._hole_seq = now_s, self.reply.next_seq
        elif now_s - self._hole_s > HOLE_S_MAX and self._bus.connected:
            self.refuse(StreamInterrupted("A part of the reply is missing; resume the stream."))
        elif now_s - self._hole_s > HOLE_READ_S:
            self.look_at_log()

    def _abandon(self) -> None:
        self._wake()
        if self._abandoned is not None and not self._abandoned.done():
            self._abandoned.set_result(None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
