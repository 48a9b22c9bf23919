"""The handoff `redirect`: the POST is answered by 303 to a streamer's own address.

The streamer with the fewest open streams is chosen, counting what we sent since it last told.
"""

import time
from collections.abc import Callable, Mapping

from starlette.responses import Response

from headrace import topology
from headrace.bus import Bus
from headrace.registry import Registry
from headrace.ticket import TICKET_S, Ticket, Tickets
from schemas import subjects
from schemas.errors import NoStreamers
from schemas.model import StreamerEntry


class Redirect:
    """Sends clients to live streamers. A `Handoff`; call `tick` each second."""

    def __init__(self, bus: Bus, tickets: Tickets, *, clock: Callable[[], float]) -> None:
        self._tickets = tickets
        self._sent: dict[str, int] = {}
        self._streamers = Registry(
            bus,
            subjects.STREAMERS,
            StreamerEntry,
            ttl_s=topology.ENTRY_TTL_S,
            clock=clock,
            on_change=self._sent.clear,
        )

    async def start(self) -> None:
        """Find the live streamers. Raises BrokerAway and BrokerRefused."""
        await self._streamers.start()

    def tick(self) -> None:
        """Forget the silent."""
        self._streamers.tick()

    def expect(
        self, *, tenant: str, request: str, deadline_s: float, keep: bool
    ) -> "ExpectedThere":
        """Choose a streamer. Raises NoStreamers."""
        live = [entry for entry in self._streamers.entries.values() if not entry.draining]
        if not live:
            raise NoStreamers("No streamer is there to carry the answer.")
        chosen = min(live, key=lambda entry: (self._load(entry), entry.name))
        self._sent[chosen.name] = self._sent.get(chosen.name, 0) + 1
        return ExpectedThere(self._tickets, chosen, tenant, request, deadline_s, keep)

    def _load(self, entry: StreamerEntry) -> int:
        return entry.open_streams + self._sent.get(entry.name, 0)


class ExpectedThere:
    """A reply that a streamer elsewhere will read: it finds in the log what comes before the
    client does."""

    def __init__(
        self,
        tickets: Tickets,
        entry: StreamerEntry,
        tenant: str,
        request: str,
        deadline_s: float,
        keep: bool,
    ) -> None:
        self._keep = keep
        self._tickets = tickets
        self._entry = entry
        self._tenant = tenant
        self._request = request
        self._deadline_s = deadline_s

    @property
    def streamer(self) -> str:
        """The streamer's name."""
        return self._entry.name

    def answer(self, *, stream: bool, headers: Mapping[str, str]) -> Response:
        """Return the redirect."""
        ticket = Ticket(
            self._entry.name,
            self._tenant,
            self._request,
            self._deadline_s,
            time.time() + TICKET_S,
            stream,
            self._keep,
        )
        location = f"{self._entry.public_url}/v1/replies/{self._tickets.sign(ticket)}"
        return Response(
            status_code=303,
            headers={"location": location, "cache-control": "no-store", **headers},
        )

    def drop(self) -> None:
        """Nothing was told to the streamer."""
