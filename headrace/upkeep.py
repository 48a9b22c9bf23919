"""Looks after the streams and buckets while a node runs. Rule: what was there and is gone is made
again as it was; a node never changes what is there, and without a queue and a log it is not ready.

Every node remembers the configurations it has seen, so whichever notices first can make a stream
again with an operator's own sizes and copies; two that do so at once make the same one. Who is told
that a stream was made anew puts back what it knows of it. JetStream's advisories say at once that
something happened; the regular look finds it where they cannot be heard.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Any, Final

from headrace import topology
from headrace.bus import BrokerAway, BrokerRefused, Bus, Message
from headrace.pending import Errands, Work
from schemas import subjects

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
LOOK_TIMEOUT_S: Final = 2.0
GONE_S: Final = 1.0
"""How long a stream stays gone: nats-server removes the old one's files after it has said that they
are gone, and takes a new one's along that was made too soon."""
FAILURES_MAX: Final = 2
"""Looks in a row that bring nothing before the node is not ready."""
NEEDED: Final = (subjects.REQUESTS, subjects.REPLIES)
"""Without these nothing can be accepted."""
CHANGES: Final = "$JS.EVENT.ADVISORY.STREAM.*.*"
_NOT_FOUND: Final = 10059
_EXISTS: Final = 10058


class Missing(Exception):
    """A stream is not there, and cannot be made now."""


class Upkeep:
    """The streams of one broker; run `forever` as a task."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._configs: dict[str, dict[str, Any]] = {}
        self._created: dict[str, str] = {}
        self._remade: dict[str, Errands] = {}
        self._turns = deque(topology.names())
        self._changed: set[str] = set(self._turns)
        self._due = asyncio.Event()
        self._failures = 0
        self._said: dict[str, str] = {}
        self._gone_s: dict[str, float] = {}

    def on_remade(self, stream: str, work: Work) -> None:
        """Have `work` done, in a task of its own, whenever a stream was made anew; where the broker
        is away or refuses, it is tried again."""
        errands = self._remade.setdefault(stream, Errands(lambda: self._bus.connected))
        errands.after_return(work)

    async def forever(self) -> None:
        """Look each second, at once where something happened; for ever."""
        await self._listen()
        while True:
            self._due.clear()
            if self._bus.connected:
                await self._look()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def _listen(self) -> None:
        async def happened(message: Message) -> None:
            *_, stream = message.subject.split(".")
            if stream in self._turns:
                self._changed.add(stream)
                self._due.set()

        async def returned() -> None:
            self._failures = 0
            self._changed.update(self._turns)
            self._due.set()

        self._bus.on_reconnect(returned)
        try:
            await self._bus.subscribe(CHANGES, happened)
        except BrokerAway as error:
            log.debug("no advisories: %s", error)

    async def _look(self) -> None:
        """Look at the two streams of requests, at one of the others, and at those in doubt."""
        self._turns.rotate()
        names = sorted({*NEEDED, self._turns[0], *self._changed})
        # At once: each of those without a leader takes its whole time.
        found = await asyncio.gather(*map(self._fault_of, names))
        if not self._bus.connected:
            return
        faults = {name: fault for name, fault in zip(names, found, strict=True) if fault}
        needed = [faults.pop(name) for name in NEEDED if name in faults]
        self._failures = self._failures + 1 if needed else 0
        if not needed:
            self._report(None)
        elif self._failures >= FAILURES_MAX or self._gone_s.keys() & set(NEEDED):
            self._report(needed[0])
        for name, fault in faults.items():
            before, self._said[name] = self._said.get(name), fault
            log.log(logging.DEBUG if before == fault else logging.INFO, "%s", fault)

    async def _fault_of(self, name: str) -> str | None:
        """Look at a stream; return what is wrong with it."""
        self._changed.discard(name)  # first: what happens while we look is looked at again
        try:
            await self._look_at(name)
        except (BrokerAway, BrokerRefused, Missing) as error:
            self._changed.add(name)
            return f"{name}: {error}"
        self._said.pop(name, None)
        return None

    def _report(self, fault: str | None) -> None:
        before, self._bus.fault = self._bus.fault, fault
        if fault is None and before is not None:
            log.warning("JetStream can be used again")
        elif fault is not None and before is None:
            log.error("JetStream cannot be used: %s", fault)

    async def _look_at(self, name: str) -> None:
        try:
            info = await self._bus.api(f"STREAM.INFO.{name}", timeout_s=LOOK_TIMEOUT_S)
        except BrokerRefused as error:
            if error.code != _NOT_FOUND:
                raise
            info = await self._make(name)
        self._configs[name] = info["config"]
        self._gone_s.pop(name, None)
        before, self._created[name] = self._created.get(name), info["created"]
        if before not in (None, info["created"]) and name in self._remade:
            self._remade[name].returned()

    async def _make(self, name: str) -> dict[str, Any]:
        config = self._configs.get(name)
        if config is None:
            raise Missing("it does not exist; `headrace topology apply` makes it")
        now_s = time.monotonic()
        if now_s - self._gone_s.setdefault(name, now_s) < GONE_S:
            raise Missing("it was deleted; it is made again in a moment")
        if name == subjects.REPLIES:
            # This log numbers the attempts, which must rise: microseconds do so faster than frames.
            config = config | {"first_seq": time.time_ns() // 1000}
        try:
            info = await self._bus.api(f"STREAM.CREATE.{name}", config)
        except BrokerRefused as error:
            if error.code != _EXISTS:  # another node was faster
                raise
            return await self._bus.api(f"STREAM.INFO.{name}", timeout_s=LOOK_TIMEOUT_S)
        log.warning("%s was gone with all it held: made again", name)
        return info
