"""A worker's requests: which it holds, how each ends, what it does when told to stop."""

import asyncio
import contextlib
import logging
import time
from typing import Final

import msgspec

from headrace import registry, topology
from headrace.bus import BrokerAway, BrokerRefused, Bus, Message
from headrace.registry import Registry
from headrace.settle import settle, settlement_of
from schemas import subjects
from schemas.life import State
from schemas.model import ModelCard, WorkerEntry
from schemas.subjects import HoldsQuestion, LostNotice, RequestSubject
from schemas.wire import BadEnvelope, Envelope, decode_envelope
from workers.burial import bury
from workers.cancels import Tombstones
from workers.course import SUSPECT_DEATHS, Course, Recovery
from workers.doubt import Standstills, is_replaced, may_be_replaced
from workers.engine import Engine, EngineDied
from workers.generation import AlreadyStarted, Generation, Lost
from workers.history import History
from workers.intake import TERM, Intake
from workers.keeping import keep_answer
from workers.lease import Leases
from workers.leaving import leave
from workers.ownership import owned, rivals
from workers.recovery import is_held, past_of, recover, was_seen
from workers.release import Releases
from workers.slots import Slots

log = logging.getLogger(__name__)

ACK: Final = b"+ACK"
NAK: Final = b"-NAK"

STALL_S: Final = topology.HEARTBEAT_S + 1.0


class Worker:
    """Runs one engine's share of the queue."""

    def __init__(
        self, bus: Bus, engine: Engine, card: ModelCard, leases: Leases, *, name: str
    ) -> None:
        self.name = name
        self.draining = False
        self.finished = 0
        self.failed = 0
        self.tokens = 0
        self.recovered = 0
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bus = bus
        self._engine = engine
        self._card = card
        self._leases = leases
        self._held: dict[str, Generation] = {}
        self._tombstones = Tombstones()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = Slots(engine.slots)
        self.releases = Releases(bus)
        self._beat_s = time.monotonic()
        self._standstills = Standstills(bus, self._verify_held)
        self._idle = asyncio.Event()
        self._idle.set()
        self._peers = Registry(
            bus,
            subjects.WORKERS,
            WorkerEntry,
            ttl_s=topology.ENTRY_TTL_S,
            clock=time.monotonic,
        )
        self.intake = Intake(
            *(bus, card),
            slots=engine.slots,
            held=lambda: len(self._held),
            deliver=self._deliver,
            holds=self._held.__contains__,
        )

    @property
    def held(self) -> int:
        """How many requests this worker has taken and not yet ended."""
        return len(self._held)

    def envelopes(self) -> list[Envelope]:
        """Return the requests that this worker holds."""
        return [each.envelope for each in self._held.values() if not each.lost]

    @property
    def generations(self) -> list[Generation]:
        """What this worker holds."""
        return list(self._held.values())

    async def start(self) -> None:
        """Listen to peers, cancels and questions, then begin to pull. Raises BrokerAway."""
        await self._peers.start()
        await self._bus.subscribe(subjects.CANCEL_SIGNALS, self._cancel_signal)
        await self._bus.subscribe(subjects.worker_holds(self.name), self._holds)
        await self._bus.subscribe(subjects.worker_loses(self.name), self._loses)
        self._bus.on_reconnect(self._reconnected)
        await self.announce()
        await self.intake.start()

    async def announce(self) -> None:
        """Say that we live, and settle which partitions are ours."""
        load = self._engine.load()
        entry = WorkerEntry(
            name=self.name,
            model=self._card.name,
            slots=self._engine.slots,
            running=load.running,
            waiting=len(self._held) - load.running,
            draining=self.draining,
        )
        await registry.announce(self._bus, subjects.WORKERS, self.name, entry)
        self.intake.credits.owned = owned(
            self.name,
            rivals(self._peers.entries, model=self._card.name),
            partitions=self._card.partitions,
        )

    async def beat_forever(self) -> None:
        """Once a second: heartbeat, keepalives, and forgetting."""
        while True:
            await asyncio.sleep(topology.HEARTBEAT_S)
            stalled, now_s = self._stalled(), time.monotonic()
            self._beat_s = now_s
            self._leases.alive()
            if stalled:
                self._standstills.noticed()
            if not self._engine.alive:
                self._engine_died(EngineDied("the engine's process ended while idle"))
            self._peers.tick()
            self._tombstones.prune(now_s=now_s)
            with contextlib.suppress(BrokerAway):
                await self.announce()
                for generation in list(self._held.values()):
                    await generation.keep_alive(now_s=now_s)

    async def watch_engine(self) -> None:
        """Last as long as the engine. Raises EngineDied."""
        await self.dead

    async def drain(self, *, grace_s: float) -> None:
        """Pull no more, let what runs end for `grace_s`, then give the rest back."""
        self.draining = True
        await self.intake.stop()
        with contextlib.suppress(BrokerAway):
            await self.announce()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        for generation in list(self._held.values()):
            log.info("%s: given back", generation.envelope.request)
            self._leases.release(generation.envelope.request)
            with contextlib.suppress(BrokerAway):
                await generation.give_back()
                await self._bus.publish(generation.ack, NAK)
        await leave(list(self._tasks), set(self._held))
        with contextlib.suppress(BrokerAway, BrokerRefused):
            await registry.withdraw(self._bus, subjects.WORKERS, self.name)

    async def _deliver(self, subject: RequestSubject, message: Message) -> None:
        held = self._held.get(subject.request)
        if held is not None:
            self._adopt(held, message.reply)  # our own, delivered again after an outage
            return
        try:
            envelope = decode_envelope(message.data)
        except BadEnvelope as error:
            log.error("%s cannot be read and is dropped: %s", subject.request, error)
            await self._bus.publish(message.reply, TERM)
            return
        generation = Generation(
            self._bus, envelope, place=message.subject, worker=self.name, ack=message.reply
        )
        generation.first = self.intake.is_first(subject, message)
        self._held[subject.request] = generation
        self._idle.clear()
        self._leases.hold(subject.request, message.reply)
        task = asyncio.create_task(self._run(generation), name=subject.request)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _adopt(self, generation: Generation, ack: str) -> None:
        generation.ack = ack
        self._leases.hold(generation.envelope.request, ack)

    async def _run(self, generation: Generation) -> None:
        """Run one delivered request to its end; the outermost frame of its task."""
        request = generation.envelope.request
        done = False
        deadline = asyncio.get_running_loop().call_later(
            max(0.0, generation.expires_in_s()), generation.expire
        )
        try:
            async with self._slots.one(unless=generation.cancelled):
                done = await self._run_claimed(generation)
        except EngineDied as error:
            self._engine_died(error)
        except (BrokerAway, BrokerRefused, Lost) as error:
            log.warning("%s is left to be delivered again: %s", request, error)
            if generation.attempt:
                self.releases.owe(generation.envelope.reply, generation.released())
        except Exception:
            log.exception("%s failed here; it is left to be delivered again", request)
        finally:
            doubtful = self._leases.lapsed(request)
            deadline.cancel()
            self._release(generation)
        if not done or (doubtful and await may_be_replaced(self._bus, generation)):
            return
        with contextlib.suppress(BrokerAway):  # delivered again, it is found ended in the log
            await keep_answer(self._bus, generation.envelope)
            await self._bus.publish(generation.ack, ACK)

    def _engine_died(self, error: EngineDied) -> None:
        if not self.dead.done():
            log.error("the engine died: %s", error)
            self.dead.set_exception(error)

    def _release(self, generation: Generation) -> None:
        request = generation.envelope.request
        self._held.pop(request, None)
        self._leases.release(request)
        self.tokens += generation.tokens
        self.finished += generation.state is State.FINISHED
        self.failed += generation.state in (State.FAILED, State.EXPIRED, State.CANCELLED)
        if not self._held:
            self._idle.set()
        self.intake.room_changed()

    async def _run_claimed(self, generation: Generation) -> bool:
        """Run a request unless it has ended or is another's; return whether it has ended."""
        if self._is_cancelled(generation):
            generation.cancel()
        if generation.expires_in_s() <= 0:
            generation.expire()  # before the engine hears of it
        if generation.first:
            # Surely ours: the engine need not wait for the broker's word, only its tokens must.
            generation.begin(self._engine)
        try:
            await generation.claim()
        except BaseException as error:
            await generation.abandon()
            if not isinstance(error, AlreadyStarted):
                raise
            return await self._run_again(generation)
        if not generation.first and await was_seen(self._bus, generation.envelope):
            await generation.fail("worker_lost", "What was made of this request is lost.")
            return True
        return await self._run_to_end(generation)

    async def _run_to_end(self, generation: Generation) -> bool:
        if self._is_cancelled(generation):
            generation.cancel()
        await generation.run(self._engine)
        return True

    async def _run_again(self, generation: Generation) -> bool:
        """Run a request that was begun before, as `_run_claimed`."""
        envelope = generation.envelope
        history = await past_of(self._bus, envelope)
        if history.end is not None:  # of which ingress may not have heard
            await settle(self._bus, settlement_of(envelope, history.end.usage))
            return True
        if await self._is_anothers(generation, history):
            return False
        # Its holder may have ended it, and so hold it no more, since the log was read.
        if (await past_of(self._bus, envelope)).ended:
            return True
        if history.deaths >= SUSPECT_DEATHS:
            # It may kill us too: nobody else should die with it, nor claim anything meanwhile.
            async with self._slots.others(unless=generation.cancelled):
                # Who was cut off may be back by now.
                if (await past_of(self._bus, envelope)).deaths >= SUSPECT_DEATHS:
                    return await self._take_over(generation, asked=history.latest)
        return await self._take_over(generation, asked=history.latest)

    async def _take_over(self, generation: Generation, *, asked: int) -> bool:
        """Claim a request that was begun before, and go on with it; as `_run_claimed`.

        `asked` is the last attempt whose holder was asked whether it lives.
        """
        envelope = generation.envelope
        attempt = await generation.claim_again()
        history = await past_of(self._bus, envelope, attempt=attempt)
        overtaken = history.latest != asked and not history.ended
        if overtaken and await self._is_anothers(generation, history):
            self.releases.owe(envelope.reply, generation.released())
            return False
        if history.holder is not None:
            notice = msgspec.json.encode(LostNotice(envelope.request, attempt))
            await self._bus.publish(subjects.worker_loses(history.holder), notice)
        recovery = await recover(self._bus, envelope, history)
        if recovery.course is Course.ENDED:
            return True
        await generation.resume(recovery.made, resume_at=recovery.resume_at)
        self.recovered += 1
        log.info(
            "%s: taken over at token %d: %s",
            envelope.request,
            generation.next_seq,
            recovery.course.value,
        )
        match recovery.course:
            case Course.LOST:
                await generation.fail("worker_lost", "The worker that ran this request is gone.")
            case Course.DEADLY:
                await self._bury(generation, recovery)
            case Course.GO_ON | Course.ANEW:
                return await self._run_to_end(generation)
        return True

    async def _bury(self, generation: Generation, recovery: Recovery) -> None:
        """Make a dead letter of a request that has killed too often, and tell its client."""
        envelope = generation.envelope
        reason = f"{recovery.deaths} workers died while they ran it"
        await bury(
            self._bus,
            envelope,
            place=generation.place,
            reason=reason,
            tokens=generation.next_seq,
            attempt=generation.attempt,
        )
        log.error("%s: %s; it is a dead letter now", envelope.request, reason)
        await generation.fail("worker_lost", f"The request was given up: {reason}.")

    async def _is_anothers(self, generation: Generation, history: History) -> bool:
        """Ask the last holder, if that was not us, whether it holds the request still."""
        holder = history.holder
        if holder is None or holder == self.name:
            return False
        request, heard_s = generation.envelope.request, self._peers.heard_s(holder)
        return await is_held(
            self._bus, holder, request=request, ack=generation.ack, heard_s=heard_s
        )

    def _is_cancelled(self, generation: Generation) -> bool:
        return self._tombstones.has(generation.envelope.request, now_s=time.monotonic())

    async def _cancel_signal(self, message: Message) -> None:
        request = message.subject.rpartition(".")[2]
        self._tombstones.add(request, now_s=time.monotonic())
        generation = self._held.get(request)
        if generation is not None:
            generation.cancel()

    async def _holds(self, message: Message) -> None:
        question = msgspec.json.decode(message.data, type=HoldsQuestion)
        generation = self._held.get(question.request)
        wanted = generation is not None and self._leases.has(question.request)  # not given back
        if generation is None or not wanted or generation.lost or self._stalled():
            answer = b"no"
        else:
            answer = b"yes"
            self._adopt(generation, question.ack)
        await self._bus.publish(message.reply, answer)

    async def _loses(self, message: Message) -> None:
        """Give up what another worker has taken over, because we did not answer in time."""
        notice = msgspec.json.decode(message.data, type=LostNotice)
        generation = self._held.get(notice.request)
        if generation is not None and generation.attempt < notice.attempt:
            self._lose(generation)

    def _lose(self, generation: Generation) -> None:
        log.warning("%s: another worker runs it now; given up", generation.envelope.request)
        self._leases.release(generation.envelope.request)
        generation.lose()

    def _stalled(self) -> bool:
        """Whether this process did not run for a while: others may have taken over since."""
        return time.monotonic() - self._beat_s > STALL_S

    async def _verify_held(self) -> None:
        """Give up what others have taken over, as far as the log can be read."""
        for generation in list(self._held.values()):
            with contextlib.suppress(BrokerAway, BrokerRefused):
                if generation.attempt and await is_replaced(self._bus, generation):
                    self._lose(generation)

    async def _reconnected(self) -> None:
        await self._verify_held()
        for generation in list(self._held.values()):
            if not generation.lost:
                await generation.republish()
