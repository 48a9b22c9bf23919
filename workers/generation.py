"""One request while it runs: its frames go out in order, the log numbers its attempt, one terminal
frame ends it.

Every 32nd frame is a checkpoint: it asks for an acknowledgement and repeats what was not yet
acknowledged, so one acknowledged message makes the log complete. An acknowledgement proves its own
message only; where none comes, the checkpoint is sent again. While the broker is away the engine
goes on, and what it makes is kept.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from headrace import journal
from headrace.bus import API_TIMEOUT_S, BrokerAway, BrokerRefused, Bus, Message, stored
from headrace.settle import settle, settlement_of
from schemas import subjects
from schemas.life import State, step
from schemas.wire import (
    Envelope,
    Failed,
    Finished,
    Keepalive,
    Piece,
    Released,
    Started,
    Tokens,
    Usage,
    decode_frame,
    encode_frame,
    span,
)
from workers.engine import Engine, EngineFailed, EngineRefused, Finish, Held, Work

log = logging.getLogger(__name__)

CHECKPOINT_FRAMES: Final = 32
KEEPALIVE_S: Final = 5.0
RETRY_S: Final = 0.25
CHECKPOINT_S: Final = 2.0
"""The age of a checkpoint after which what it did not prove is sent again."""
PATIENCE_S: Final = 60.0
"""How long after its deadline a request's end is worth storing."""
CLAIM_TIMEOUT_S: Final = 30.0
"""Of a claim that may follow others: one stored after all, unknown to us, counts as a death."""
_FRAME_BYTES: Final = 4096  # what a frame holds besides its pieces, and the protocol's own lines
_WRONG_LAST_SEQUENCE: Final = 10071


class AlreadyStarted(Exception):
    """The log holds frames of this request: it was delivered before."""


class Lost(Exception):
    """This attempt ends without a terminal frame: it could not be stored, or another runs."""


class Generation:
    """A request that this worker runs."""

    def __init__(self, bus: Bus, envelope: Envelope, *, place: str, worker: str, ack: str) -> None:
        """`place` is the subject that the request was published under."""
        self.envelope = envelope
        self.place = place
        self.ack = ack
        self.first = False
        self.state = State.DELIVERED
        self.tokens = 0
        self._bus = bus
        self._worker = worker
        self._attempt = 0
        self._made: tuple[Piece, ...] = ()
        self._held = Held()
        self._seq = 0
        self._unacked: list[Piece] = []
        self._unacked_seq = 0
        self._frames = 0
        self._checkpoint_s = time.monotonic()
        self._sent_s = time.monotonic()
        self._running: asyncio.Task[Finish] | None = None
        self.lost = False
        self._claimed = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._expired = False
        self._first_s: float | None = None
        self._ran = False

    @property
    def attempt(self) -> int:
        """The attempt's number, 0 before the claim was stored."""
        return self._attempt

    @property
    def next_seq(self) -> int:
        """The seq of the next token."""
        return self._seq

    async def claim(self) -> None:
        """Publish `started`: the log's sequence for it is the attempt's number.

        Waits for a broker that is away, as long as the deadline allows: the engine is at work
        already. Raises AlreadyStarted, BrokerAway, BrokerRefused.
        """
        unknown = False
        while True:
            try:
                await self._claim_first(again=unknown)
                break
            except BrokerAway:
                unknown = True  # it may be stored all the same
                if self.lost or time.time() > self.envelope.deadline_s:
                    raise
            await asyncio.sleep(RETRY_S)
        self._go()

    async def _claim_first(self, *, again: bool) -> None:
        """Claim what has nothing in its log or, where it is tried `again`, our claim alone."""
        try:
            await self._claim(resume_at=0, headers={"Nats-Expected-Last-Subject-Sequence": "0"})
        except BrokerRefused as error:
            if error.code != _WRONG_LAST_SEQUENCE:
                raise
            if not (again and await self._find_claim()):
                raise AlreadyStarted from None

    async def _find_claim(self) -> bool:
        """Look whether the log holds our claim and nothing else. Raises as `claim_again`."""
        entries = await journal.read(self._bus, subjects.REPLIES, self.envelope.reply)
        if len(entries) != 1:
            return False
        frame = decode_frame(entries[0].data)
        if not isinstance(frame, Started) or frame.worker != self._worker:
            return False
        self._attempt = entries[0].seq
        return True

    async def claim_again(self) -> int:
        """Claim a request that was started before; return the attempt's number. `resume` must
        follow, once the log was read up to there. Raises BrokerAway and BrokerRefused."""
        await self._claim(resume_at=None, headers=None)
        return self._attempt

    async def _claim(self, *, resume_at: int | None, headers: dict[str, str] | None) -> None:
        frame = encode_frame(Started(0, self._worker, resume_at, self.envelope.shape))
        wait_s = CLAIM_TIMEOUT_S if headers is None else API_TIMEOUT_S
        ack = await self._bus.store(self.envelope.reply, frame, headers=headers, timeout_s=wait_s)
        self._attempt = ack.seq

    async def resume(self, made: Sequence[Piece], *, resume_at: int) -> None:
        """Go on after `made`; this attempt publishes again what the log lacks: the pieces from
        `resume_at` on. Raises BrokerAway and BrokerRefused."""
        self._ran = True  # by an earlier attempt
        self._made = tuple(made)
        self._seq, self._unacked_seq = span(made), resume_at
        seq = 0
        for piece in made:
            if seq >= resume_at:
                self._unacked.append(piece)
            seq += len(piece.tokens)
        frame = Started(self._attempt, self._worker, resume_at, self.envelope.shape)
        await self._bus.store(self.envelope.reply, encode_frame(frame))
        if self._unacked:
            await self._send_checkpoint()
        self._go()

    def _go(self) -> None:
        self.state = step(self.state, State.GENERATING)
        self._claimed.set()

    def begin(self, engine: Engine) -> None:
        """Start the engine's work; what it makes waits until the request is claimed."""
        asked = self.envelope
        work = Work(
            *(asked.request, asked.tokens, asked.sampling, asked.cache_salt, asked.priority),
            *(asked.sim, self._made, asked.parsing, asked.tenant, asked.model),
            moderated=asked.moderated,
            held=self._held,
        )
        self._running = asyncio.create_task(engine.generate(work, self._emit), name="generate")
        if self.cancelled.is_set():
            self._running.cancel()
        else:
            self._ran = True

    async def abandon(self) -> None:
        """Stop the engine's work without a word: the request is another's."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
            self._running, self._held = None, Held()

    async def run(self, engine: Engine) -> None:
        """Run a claimed request to its terminal frame. Raises EngineDied and Lost."""
        started_s = time.monotonic()
        if self._running is None:
            self.begin(engine)
        assert self._running is not None
        try:
            finish = await self._running
        except asyncio.CancelledError:
            if self.lost:
                raise Lost("another worker runs it") from None
            if not self.cancelled.is_set():
                raise
            if self._expired:
                await self.fail("deadline_exceeded", "The request's deadline has passed.")
            else:
                await self.fail("request_cancelled", "The request was cancelled.")
        except EngineRefused as error:
            await self.fail("invalid_request", f"The engine refuses this request: {error}")
        except EngineFailed as error:
            await self.fail(error.code, str(error))
        else:
            await self._finish(finish, started_s)

    async def _finish(self, finish: Finish, started_s: float) -> None:
        timings = {"total_ms": (time.monotonic() - started_s) * 1e3}
        if self._first_s is not None:
            timings["first_token_ms"] = (self._first_s - started_s) * 1e3
        self.state = step(self.state, State.FINISHED)
        await self._terminate(
            lambda: Finished(
                self._attempt,
                self._unacked_seq,
                tuple(self._unacked),
                finish.reasons,
                finish.usage,
                timings,
            )
        )

    def lose(self) -> None:
        """Stop at once and without a word: another attempt runs the request."""
        self.lost = True
        if self._running is not None:
            self._running.cancel()

    def cancel(self) -> None:
        """Stop at once; the terminal frame will say that it was cancelled."""
        self.cancelled.set()
        if self._running is not None:
            self._running.cancel()

    def expires_in_s(self) -> float:
        """Return the seconds until the request's deadline; below 0 once it has passed."""
        return self.envelope.deadline_s - time.time()

    def expire(self) -> None:
        """Stop at once, or never start; the terminal frame will say that the deadline passed."""
        if not self.cancelled.is_set():
            self._expired = True
            self.cancel()

    async def give_back(self) -> None:
        """Say that the attempt ends through no fault of the request. Raises BrokerAway."""
        if self._attempt:
            await self.republish()
            await self._bus.publish(self.envelope.reply, encode_frame(self.released()))

    def released(self) -> Released:
        """Return the frame that says so, of a claimed request."""
        return Released(self._attempt, self._seq - 1)

    async def republish(self) -> None:
        """Send again what no acknowledgement covers: the connection was broken."""
        if self._unacked and self._attempt:
            await self._send_checkpoint()

    async def announce_again(self) -> None:
        """Begin a log that was made anew: who is given the request shall find who runs it. Raises
        BrokerAway and BrokerRefused."""
        if self.state is State.GENERATING:
            frame = Started(self._attempt, self._worker, self._unacked_seq, self.envelope.shape)
            await self._bus.store(self.envelope.reply, encode_frame(frame))
            await self.republish()

    async def keep_alive(self, *, now_s: float) -> None:
        """Say that the attempt lives, where nothing else did for a while; send again what was not
        acknowledged in time."""
        if self._unacked and self._attempt and now_s - self._checkpoint_s > CHECKPOINT_S:
            await self._send_checkpoint()
        self._sent_s = self._sent_s or now_s
        if self.state is State.GENERATING and now_s - self._sent_s > KEEPALIVE_S:
            self._sent_s = now_s
            frame = Keepalive(self._attempt, self._seq - 1)
            await self._bus.publish(self.envelope.reply, encode_frame(frame))

    async def _emit(self, pieces: Sequence[Piece]) -> None:
        if not self._claimed.is_set():
            await self._claimed.wait()
        seq = self._seq
        for piece in pieces:
            self._seq += len(piece.tokens)
        self._unacked.extend(pieces)
        self._frames += 1
        if self._first_s is None:
            self._first_s = time.monotonic()
        if self._frames % CHECKPOINT_FRAMES == 0:
            await self._send_checkpoint()
            return
        self._sent_s = 0.0  # the next look sets it: a clock read per token would cost more
        try:
            await self._bus.publish(
                self.envelope.reply, encode_frame(Tokens(self._attempt, seq, tuple(pieces)))
            )
        except BrokerAway:
            return  # kept among the unacknowledged, and sent again when the broker is back

    async def _send_checkpoint(self) -> None:
        """Publish all that is not acknowledged, and ask for an acknowledgement."""
        self._checkpoint_s = time.monotonic()
        try:
            await self._store_surplus()
            pieces = tuple(self._unacked)
            frame = Tokens(self._attempt, self._unacked_seq, pieces)
            end = self._unacked_seq + span(pieces)
            answer = await self._bus.store_soon(self.envelope.reply, encode_frame(frame))
        except (BrokerAway, BrokerRefused):
            return
        answer.add_done_callback(lambda done: self._acked(done, end))
        # Not with the next one: where answers take longer than its tokens, none would ever count.
        asyncio.get_running_loop().call_later(API_TIMEOUT_S, answer.cancel)

    async def _store_surplus(self) -> None:
        """Store the first of what is not acknowledged while all of it is too much for one message:
        a long outage leaves more. Raises BrokerAway and BrokerRefused."""
        if len(self._unacked) <= CHECKPOINT_FRAMES:
            return
        bytes_max = self._bus.payload_bytes_max - _FRAME_BYTES
        count = len(self._unacked)
        while True:
            pieces = tuple(self._unacked[:count])
            data = encode_frame(Tokens(self._attempt, self._unacked_seq, pieces))
            if len(data) > bytes_max and count > 1:
                count = (count + 1) // 2
                continue
            if count >= len(self._unacked):
                return
            end = self._unacked_seq + span(pieces)
            await self._bus.store(self.envelope.reply, data)
            self._forget_until(end)

    def _acked(self, answer: "asyncio.Future[Message]", end: int) -> None:
        if answer.cancelled():
            return
        try:
            stored(answer)
        except (BrokerAway, BrokerRefused) as error:
            log.debug("%s: a checkpoint was not stored: %s", self.envelope.request, error)
            return
        self._forget_until(end)

    def _forget_until(self, end: int) -> None:
        """Forget the pieces before a seq: they are in the log."""
        dropped = 0
        seq = self._unacked_seq
        for piece in self._unacked:
            if seq >= end:
                break
            seq += len(piece.tokens)
            dropped += 1
        del self._unacked[:dropped]
        self._unacked_seq = seq

    async def fail(self, code: str, message: str) -> None:
        """End a claimed request with an error. Raises Lost."""
        state = {
            "deadline_exceeded": State.EXPIRED,
            "request_cancelled": State.CANCELLED,
        }.get(code, State.FAILED)
        self.state = step(self.state, state)
        usage = Usage(len(self.envelope.prompt) // 4, self._seq + self._held.tokens, 0)
        await self._terminate(
            lambda: Failed(
                self._attempt, self._unacked_seq, tuple(self._unacked), code, message, usage
            )
        )

    async def _terminate(self, frame: Callable[[], Finished | Failed]) -> None:
        """Tell ingress what was used and store the terminal frame, with what is not acknowledged
        when it is sent; try until it is stored or nobody waits for it any more (then Lost)."""
        self.tokens = self._seq
        while not self.lost:
            try:
                await self._store_surplus()
                end = frame()
                # Told first: who hears of the end may ask again at once, and needs what comes back.
                await settle(self._bus, settlement_of(self.envelope, end.usage, ran=self._ran))
                await self._bus.store(self.envelope.reply, encode_frame(end))
                return
            except (BrokerAway, BrokerRefused) as error:
                if time.time() > self.envelope.deadline_s + PATIENCE_S:
                    raise Lost(str(error)) from error
            await asyncio.sleep(RETRY_S)
        raise Lost("another worker runs it")
