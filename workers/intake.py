"""Pulls requests and hears what else the broker says. Rule: we pull at our own pace.

Pulls go out as plain messages, since nats-py knows no priority groups; their statuses come back by
number. A status that casts doubt on a consumer has it looked at, and made again where it is gone.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from headrace import topology
from headrace.backlog import epoch_s
from headrace.bus import BrokerAway, BrokerRefused, Bus, Message, Subscription
from schemas import subjects
from schemas.model import ModelCard
from schemas.subjects import RequestSubject
from workers.credit import Credits, Place, Pull

log = logging.getLogger(__name__)

PUMP_S: Final = 0.05
PAUSE_S: Final = 0.25
"""How long nothing is asked of a consumer that did not serve: it may be gone, or electing."""
RETRY_S: Final = 0.5
STOP_S: Final = 1.0
"""What the broker has to forget the pulls, which end by then by themselves."""
TERM: Final = b"+TERM"
LOOK_TIMEOUT_S: Final = 2.0
FAILURES_MAX: Final = 8
"""Looks in a row that bring nothing before a line says so."""
AGAIN: Final = "Headrace-Again"
"""A header of requests that were put into a queue made anew."""
_NO_CONSUMER: Final = 10014
_DELETED: Final = f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{subjects.REQUESTS}."
_NOTHING_CAME: Final = frozenset({"404", "408"})
_DOUBTFUL: Final = frozenset({"409", "503"})
_NEXT: Final = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.REQUESTS}."

_INFO: Final = f"STREAM.INFO.{subjects.REQUESTS}"
_NO_SUBJECTS: Final = 1_000_000_000  # an offset behind all of them: the total alone is sent
LOOK_S: Final = 0.03
LOOK_SHARE: Final = 4
"""A look that takes long is taken more seldom: at most this part of the time is spent on it, or
what leaves `LOOK_PAUSE_S_MAX` between two: a broker without a leader answers none for seconds."""
LOOK_PAUSE_S_MAX: Final = 1.0
LOOK_REQUESTS_MAX: Final = 128

Deliver = Callable[[RequestSubject, Message], Awaitable[None]]


def deliveries(ack: str) -> tuple[int, float]:
    """Return how often a message was delivered, and when it was stored (epoch, seconds).

    Its ack subject tells: `$JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer
    seq>.<time>.<pending>`, or with a domain and an account before the stream (NATS ADR-15). Zeros
    where that is unknown.
    """
    tokens = ack.split(".")
    if len(tokens) < 9:
        return 0, 0.0
    first = 4 if len(tokens) == 9 else 6
    count, stored = tokens[first], tokens[first + 3]
    if not (count.isdigit() and stored.isdigit()):
        return 0, 0.0
    return int(count), int(stored) / topology.NANOSECONDS


def _ours(subject: str) -> RequestSubject | None:
    """Read the subject of a request; None for one that no part of ours publishes."""
    try:
        return RequestSubject.parse(subject)
    except ValueError:
        return None


class Intake:
    """The pulls of one worker; run `pump` as a task."""

    def __init__(
        self,
        bus: Bus,
        card: ModelCard,
        *,
        slots: int,
        held: Callable[[], int],
        deliver: Deliver,
        holds: Callable[[str], bool] = lambda request: False,
    ) -> None:
        """`held` tells how many requests the worker has, `holds` whether it has one."""
        self.credits = Credits(slots=slots, partitions=card.partitions)
        self._bus = bus
        self._card = card
        self._held = held
        self._holds = holds
        self._deliver = deliver
        self._inbox = bus.new_inbox()
        self._due = asyncio.Event()
        self._stopped = False
        self._brought: Subscription | None = None
        self._sure_s: dict[Place, float] = {}
        self._doubtful: set[Place] = set()
        self._doubt = asyncio.Event()
        self._said = ""

    async def start(self) -> None:
        """Listen for what pulls bring. Raises BrokerAway."""
        self._brought = await self._bus.subscribe(f"{self._inbox}.*", self._message)
        await self._bus.subscribe(f"{_DELETED}*", self._deleted)
        self._bus.on_reconnect(self._reconnected)
        self.doubt()

    def doubt(self) -> None:
        """Have all consumers looked at: their stream was made anew, or the connection is new."""
        for lane in subjects.LANES:
            self._doubtful.update(Place(lane, each) for each in range(self._card.partitions))
        self._sure_s.clear()
        self._doubt.set()

    def is_first(self, subject: RequestSubject, message: Message) -> bool:
        """Tell whether a request was surely never delivered before.

        A consumer that is made anew delivers all again and counts from 1, and a killed broker may
        forget its last counts. So a count is believed for requests that are younger than our last
        look at the consumer, which is taken again after each of these; by the broker's clock.
        """
        times, stored_s = deliveries(message.reply)
        sure_s = self._sure_s.get(Place(subject.lane, subject.partition), math.inf)
        return times == 1 and stored_s > sure_s and AGAIN not in (message.headers or {})

    async def stop(self) -> None:
        """Pull no more, and have the broker forget the pulls; what is on its way is handled."""
        self._stopped = True
        if self._brought is not None and self._bus.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._brought.drain()

    def room_changed(self) -> None:
        """Look at once whether there is something to pull."""
        self._due.set()

    async def pump(self) -> None:
        """Send pulls as room allows; for ever."""
        while True:
            if self._bus.connected and not self._stopped:
                for pull in self.credits.plan(held=self._held(), now_s=time.monotonic()):
                    await self._send(pull)
            try:
                async with asyncio.timeout(PUMP_S):
                    await self._due.wait()
            except TimeoutError:
                continue
            self._due.clear()

    async def look_forever(self) -> None:
        """Find out where requests wait, while there is less room than partitions; for ever."""
        loop = asyncio.get_running_loop()
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s, waiting = LOOK_S, frozenset[Place]()
            if self._bus.connected and not self._stopped and self.credits.scarce(held=self._held()):
                started_s = loop.time()
                waiting = await self._where_they_wait()
                took_s = loop.time() - started_s
                pause_s = min(max(LOOK_S, LOOK_SHARE * took_s), LOOK_PAUSE_S_MAX)
            if waiting - self.credits.waiting:
                self._due.set()
            self.credits.waiting = waiting

    async def _where_they_wait(self) -> frozenset[Place]:
        """Return where requests are queued that are not ours; nowhere where there are many, since
        whatever is pulled brings one then."""
        body = {"subjects_filter": subjects.requests_of(model=self._card.name)}
        try:
            info = await self._bus.api(_INFO, body | {"offset": _NO_SUBJECTS})
            if not self._held() < info.get("total", 0) <= LOOK_REQUESTS_MAX:
                return frozenset()
            info = await self._bus.api(_INFO, body)
        except (BrokerAway, BrokerRefused) as error:
            log.debug("the queue cannot be looked at: %s", error)
            return frozenset()
        found = map(_ours, info["state"].get("subjects") or ())
        return frozenset(
            Place(each.lane, each.partition)
            for each in found
            if each is not None and not self._holds(each.request)
        )

    async def _send(self, pull: Pull) -> None:
        body = {
            "batch": pull.batch,
            "expires": int(pull.expires_s * topology.NANOSECONDS),
            "group": subjects.PULL_GROUP,
            "priority": pull.priority,
        }
        consumer = subjects.consumer_name(pull.place.lane, self._card.name, pull.place.partition)
        try:
            await self._bus.publish(
                _NEXT + consumer, msgspec.json.encode(body), reply=f"{self._inbox}.{pull.token}"
            )
        except BrokerAway:
            self.credits.reset()

    async def _reconnected(self) -> None:
        self.credits.reset()
        self.doubt()
        self.room_changed()

    async def _message(self, message: Message) -> None:
        headers = message.headers
        status = headers.get("Status") if headers else None
        if status is not None:
            await self._status(message.subject.rpartition(".")[2], status, message)
            return
        subject = _ours(message.subject)
        if subject is None:  # it would come back for ever
            log.error("%s is no request's subject: dropped", message.subject)
            await self._bus.publish(message.reply, TERM)
            return
        place = Place(subject.lane, subject.partition)
        self.credits.delivered(place, now_s=time.monotonic())
        self._due.set()
        await self._deliver(subject, message)

    async def _status(self, token: str, status: str, message: Message) -> None:
        # 404 and 408: nothing came in time. 409: the consumer is gone, or its leader moved, or it
        # has too many pulls. 503: nobody answers for it. 100 is a heartbeat, which we never ask.
        if status == "100":
            return
        place = self.credits.ended(token)
        self._due.set()
        if status in _NOTHING_CAME or place is None:
            return
        self.credits.pause(place, until_s=time.monotonic() + PAUSE_S)
        if status in _DOUBTFUL:
            self._doubt_one(place)
        else:
            description = (message.headers or {}).get("Description", "")
            self._say(f"a pull was refused: {status} {description}")

    async def _deleted(self, message: Message) -> None:
        """Hear of a deleted consumer that we had no pull at."""
        name = message.subject.removeprefix(_DELETED)
        for lane in subjects.LANES:
            for partition in range(self._card.partitions):
                if subjects.consumer_name(lane, self._card.name, partition) == name:
                    self._doubt_one(Place(lane, partition))

    def _doubt_one(self, place: Place) -> None:
        self._sure_s.pop(place, None)
        self._doubtful.add(place)
        self._doubt.set()

    async def mend(self) -> None:
        """Look at the consumers in doubt and make again those that are gone; for ever."""
        failures = 0
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            # All at once: each of those without a leader takes its whole time.
            found = await asyncio.gather(*map(self._look_at, list(self._doubtful)))
            if made := sum(each is True for each in found):
                log.warning("%d consumers of %s were gone: made again", made, self._card.name)
            faults = [each for each in found if isinstance(each, Exception)]
            failures = failures + 1 if faults and self._bus.connected else 0
            if failures >= FAILURES_MAX:  # an election in a cluster takes a while
                self._say(f"consumers of {self._card.name} cannot be looked after: {faults[0]}")
            if not faults:
                self._said = ""
                continue
            await asyncio.sleep(RETRY_S)
            self._doubt.set()

    def _say(self, what: str) -> None:
        """Log it once, not at each try."""
        if what != self._said:
            self._said = what
            log.warning("%s", what)

    async def _look_at(self, place: Place) -> bool | BrokerAway | BrokerRefused:
        """Return whether a consumer had to be made, or why nothing is known of it."""
        name = subjects.consumer_name(place.lane, self._card.name, place.partition)
        verb = f"CONSUMER.INFO.{subjects.REQUESTS}.{name}"
        made = False
        try:
            try:
                found = await self._bus.api(verb, timeout_s=LOOK_TIMEOUT_S)
            except BrokerRefused as error:
                if error.code != _NO_CONSUMER:
                    raise
                model = self._card.name
                found = await topology.apply_consumer(self._bus, place.lane, model, place.partition)
                made = True
        except (BrokerAway, BrokerRefused) as error:
            return error
        self._sure_s[place] = epoch_s(found["ts"])
        self._doubtful.discard(place)
        self._due.set()
        return made
