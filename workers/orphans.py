"""Requests whose readers have vanished. Rule: a request runs on for some seconds without a reader,
and time counts only while the broker can be reached.

A streamer cancels for a client that leaves it. Where the streamer itself is gone, or has ended a
stream with an error that can be resumed, nobody does. So each worker asks a few times within the
patience: first the streamers that its replies are addressed to, each about all of its requests at
once; then, about those without a reader there, whoever may read them elsewhere: a resumed stream,
most of all. The broker says at once when a streamer's process is gone; silence counts as absence
too, since a machine that lost its power says nothing.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.cancel import cancel
from headrace.messages import NobodyAnswers
from schemas import subjects
from schemas.subjects import ReplySubject, UnreadQuestion
from schemas.wire import Envelope

log = logging.getLogger(__name__)

ANSWER_S: Final = 1.0
LOOKS: Final = 6
"""How often a worker looks within its patience."""

_unread = msgspec.json.Decoder(tuple[str, ...])


class Absences:
    """Since when which requests have no reader: pure, with time as an argument."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._unread_s: dict[str, float] = {}
        self._absent_s: dict[str, float] = {}

    def reset(self) -> None:
        """Give everyone a fresh patience: nothing could be heard meanwhile."""
        self._unread_s.clear()
        self._absent_s.clear()

    def heard(
        self, streamer: str, held: Collection[str], unread: Collection[str], *, now_s: float
    ) -> None:
        """Note which of the held requests of a streamer it has no reader for."""
        self._absent_s.pop(streamer, None)
        for request in held:
            if request not in unread:
                self._unread_s.pop(request, None)
            else:
                self._unread_s.setdefault(request, now_s)

    def absent(self, streamer: str, held: Collection[str], *, now_s: float) -> None:
        """Note that a streamer does not answer.

        A request that this worker has only just been given waited for its streamer as long as the
        others did.
        """
        since_s = self._absent_s.setdefault(streamer, now_s)
        for request in held:
            self._unread_s.setdefault(request, since_s)

    def patient(self, request: str, *, now_s: float) -> None:
        """Begin a request's patience anew: it has a reader elsewhere now, or was cancelled."""
        self._unread_s[request] = now_s

    def forget_all_but(self, held: Collection[str], *, now_s: float) -> None:
        """Forget requests that are not held any more, and streamers absent for long."""
        self._unread_s = {name: at_s for name, at_s in self._unread_s.items() if name in held}
        # Of a streamer's many requests one worker may be given a few at a time, with pauses.
        since_s = now_s - 20 * self._patience_s
        self._absent_s = {name: at_s for name, at_s in self._absent_s.items() if at_s > since_s}

    @property
    def unread(self) -> list[str]:
        """The requests that have no reader at their own streamer."""
        return list(self._unread_s)

    def is_due(self, request: str, *, now_s: float) -> bool:
        """Tell whether a request's patience is at its end."""
        return now_s - self._unread_s.get(request, now_s) >= self._patience_s


class Orphans:
    """Cancels what this worker holds and nobody reads; run `watch` as a task."""

    def __init__(
        self, bus: Bus, held: Callable[[], Collection[Envelope]], *, patience_s: float
    ) -> None:
        self.cancelled = 0
        self._bus = bus
        self._held = held
        self._look_s = patience_s / LOOKS
        self._absences = Absences(patience_s)
        self._connection = 0
        bus.on_reconnect(self._reconnected)

    async def watch(self) -> None:
        """Look after what is held, for ever."""
        while True:
            await asyncio.sleep(self._look_s)
            await self._look()

    async def _reconnected(self) -> None:
        self._connection += 1
        self._absences.reset()

    async def _look(self) -> None:
        connection = self._connection
        wanted = {each.request: each for each in self._held() if not each.shape.keep}
        self._absences.forget_all_but(wanted, now_s=time.monotonic())
        by_streamer: defaultdict[str, list[str]] = defaultdict(list)
        for request, envelope in wanted.items():
            by_streamer[ReplySubject.parse(envelope.reply).streamer].append(request)
        answers = await asyncio.gather(*(self._ask(name, ids) for name, ids in by_streamer.items()))
        if not self._bus.connected or connection != self._connection:
            self._absences.reset()
            return
        now_s = time.monotonic()
        for (streamer, held), unread in zip(by_streamer.items(), answers, strict=True):
            if unread is None:
                self._absences.absent(streamer, held, now_s=now_s)
            else:
                self._absences.heard(streamer, held, unread, now_s=now_s)
        await asyncio.gather(*(self._care_for(wanted[name]) for name in self._absences.unread))

    async def _ask(self, streamer: str, requests: list[str]) -> Collection[str] | None:
        """Return the requests that a streamer has no reader for; None without an answer."""
        question = msgspec.json.encode(UnreadQuestion(tuple(requests)))
        subject = subjects.streamer_unread(streamer)
        try:
            return frozenset(
                _unread.decode(await self._bus.request(subject, question, timeout_s=ANSWER_S))
            )
        except BrokerAway:
            return None

    async def _care_for(self, envelope: Envelope) -> None:
        """Ask everywhere who reads a request that its own streamer has no reader for; cancel it
        when the broker knows of nobody and its patience is at its end."""
        request, tenant = envelope.request, envelope.tenant
        subject = subjects.readers_of(tenant=tenant, request=request)
        try:
            await self._bus.request(subject, b"", timeout_s=ANSWER_S)
        except NobodyAnswers:
            if not self._absences.is_due(request, now_s=time.monotonic()):
                return
            await self._cancel(tenant=tenant, request=request)
        except BrokerAway:
            return  # somebody listens but is slow, or the broker is away: the next look will tell
        self._absences.patient(request, now_s=time.monotonic())

    async def _cancel(self, *, tenant: str, request: str) -> None:
        log.info("%s: nobody reads it any more; cancelled", request)
        try:
            await cancel(self._bus, tenant=tenant, request=request)
        except (BrokerAway, BrokerRefused) as error:
            log.warning("%s could not be cancelled: %s", request, error)
            return
        self.cancelled += 1
