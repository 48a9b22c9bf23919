"""The handoff `redirect`: the POST is answered by 303 to a streamer's own address.

The streamer with the fewest open streams is chosen, counting what we sent since it last told.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Final

from starlette.responses import Response

from headrace import topology
from headrace.bus import BrokerAway, Bus
from headrace.messages import NobodyAnswers
from headrace.registry import Registry
from headrace.ticket import RETURNS_S, TICKET_S, Ticket, Tickets
from schemas import subjects
from schemas.errors import NoStreamers
from schemas.model import StreamerEntry

PROBE_EVERY_S: Final = 0.25
PROBE_TIMEOUT_S: Final = 1.0
RATELIMIT_PREFIX: Final = "x-ratelimit-"
FOLLOW_S: Final = 0.5
"""What a client may take to follow its redirect before a streamer's word is taken for final."""


class Redirect:
    """Sends clients to live streamers. A `Handoff`; call `tick` each second, run `probe_forever`.

    Heartbeats are missed late. So each streamer is asked a few times a second whether it lives: for
    one whose process died the broker answers at once that nobody is there.
    """

    def __init__(self, bus: Bus, tickets: Tickets, *, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._tickets = tickets
        self._clock = clock
        self._sent: dict[str, list[float]] = {}
        self._turns: dict[str, int] = {}
        self._turn = itertools.count(1)
        self._dead: set[str] = set()
        self._slow: set[str] = set()
        self._streamers = Registry(
            bus,
            subjects.STREAMERS,
            StreamerEntry,
            ttl_s=topology.ENTRY_TTL_S,
            clock=clock,
            on_heard=self._heard,
        )

    async def start(self) -> None:
        """Find the live streamers. Raises BrokerAway and BrokerRefused."""
        await self._streamers.start()
        await self._probe()

    def tick(self) -> None:
        """Forget the silent."""
        self._streamers.tick()

    async def probe_forever(self) -> None:
        """Ask the streamers whether they live, a few times a second."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            await self._probe()

    @property
    def live(self) -> list[StreamerEntry]:
        """The streamers that clients may be sent to."""
        # Names are new at each start. Two at one URL are a dead one and what took its place.
        latest = {entry.public_url: entry for entry in self._streamers.entries.values()}
        live = [
            entry for entry in latest.values() if not (entry.draining or entry.name in self._dead)
        ]
        # Who is silent may be frozen, or as busy as all of this machine: better than nobody.
        return [entry for entry in live if entry.name not in self._slow] or live

    def expect(
        self, *, tenant: str, request: str, deadline_s: float, keep: bool, model: str = ""
    ) -> "ExpectedThere":
        """Choose a streamer. Raises NoStreamers."""
        return ExpectedThere(self, self._choose(), tenant, request, deadline_s, keep, model)

    async def attach(
        self,
        *,
        tenant: str,
        request: str,
        deadline_s: float,
        stream: bool,
        headers: Mapping[str, str],
        after: int = -1,
        returns: bool = False,
    ) -> Response:
        """Send a further reader to any streamer. Raises NoStreamers."""
        chosen = self._choose()
        ticket = Ticket(
            chosen.name,
            tenant,
            request,
            deadline_s,
            time.time() + (RETURNS_S if returns else TICKET_S),
            stream,
            attach=secrets.token_hex(8),
            lingers=True,
            after=after,
            returns=returns,
            ratelimit=_ratelimit(headers),
        )
        return self.to(chosen, ticket, headers)

    def to(self, entry: StreamerEntry, ticket: Ticket, headers: Mapping[str, str]) -> Response:
        """Return the redirect of a ticket's holder to a streamer."""
        location = f"{entry.public_url}/v1/replies/{self._tickets.sign(ticket)}"
        return Response(
            status_code=303,
            headers={"location": location, "cache-control": "no-store", **headers},
        )

    def _choose(self) -> StreamerEntry:
        live = self.live
        if not live:
            raise NoStreamers("No streamer is there to carry the answer.")
        chosen = min(live, key=self._rank)
        self._turns[chosen.name] = next(self._turn)
        self._sent.setdefault(chosen.name, []).append(self._clock())
        return chosen

    def dropped(self, streamer: str) -> None:
        """Note that a request that was counted for a streamer is not sent there."""
        if sent := self._sent.get(streamer):
            sent.pop()

    def _rank(self, entry: StreamerEntry) -> tuple[int, int, str]:
        load = entry.open_streams + len(self._sent.get(entry.name, ()))
        # Among equals it goes round, so that none idles while another has all short requests.
        return load, self._turns.get(entry.name, 0), entry.name

    def _heard(self, streamer: str) -> None:
        # Of this one alone: what was sent to the others is not yet in what they told. And who was
        # sent just now is still on the way, so not in what this one told either.
        since_s = self._clock() - FOLLOW_S
        if sent := [at_s for at_s in self._sent.pop(streamer, ()) if at_s > since_s]:
            self._sent[streamer] = sent

    async def _probe(self) -> None:
        names = list(self._streamers.entries)
        self._dead.intersection_update(names)
        self._slow.intersection_update(names)
        for gone in self._turns.keys() - set(names):
            del self._turns[gone]
            self._sent.pop(gone, None)
        await asyncio.gather(*(self._ask(name) for name in names))

    async def _ask(self, streamer: str) -> None:
        subject = subjects.streamer_alive(streamer)
        try:
            await self._bus.request(subject, b"", timeout_s=PROBE_TIMEOUT_S)
        except NobodyAnswers:
            self._dead.add(streamer)
        except BrokerAway:
            if self._bus.connected:
                self._slow.add(streamer)
        else:
            self._dead.discard(streamer)
            self._slow.discard(streamer)


class ExpectedThere:
    """A reply that a streamer elsewhere will read: it finds in the log what comes before the
    client does."""

    def __init__(
        self,
        redirect: Redirect,
        entry: StreamerEntry,
        tenant: str,
        request: str,
        deadline_s: float,
        keep: bool,
        model: str,
    ) -> None:
        self._keep = keep
        self._model = model
        self._redirect = redirect
        self._entry = entry
        self._tenant = tenant
        self._request = request
        self._deadline_s = deadline_s

    @property
    def streamer(self) -> str:
        """The streamer's name."""
        return self._entry.name

    def answer(
        self, *, stream: bool, headers: Mapping[str, str], lingers: bool = False
    ) -> Response:
        """Return the redirect."""
        ticket = Ticket(
            self._entry.name,
            self._tenant,
            self._request,
            self._deadline_s,
            time.time() + TICKET_S,
            stream,
            self._keep,
            lingers=lingers,
            model=self._model,
            ratelimit=_ratelimit(headers),
        )
        return self._redirect.to(self._entry, ticket, headers)

    def drop(self) -> None:
        """Nothing was told to the streamer; only our own count of what it has."""
        self._redirect.dropped(self._entry.name)


def _ratelimit(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what of an answer's headers the streamer says too."""
    return {name: value for name, value in headers.items() if name.startswith(RATELIMIT_PREFIX)}
