"""How much to ask for, of which partition, and how urgently.

Rule: outstanding pulls + held requests ≤ slots + `OVERCOMMIT`. A worker pulls its own partitions
at priority 0, several requests each; the others one by one at priority 1 to 9, by its load; lane
`batch` last, and only while half of its slots are free and no others are said to wait, or once it
is owed: for every `BATCH_OWED_AFTER` others one. With less room than partitions half of it
rotates, by short pulls, and the rest is for where requests are said to wait. Pure: no clock, no
broker.
"""

import itertools
from dataclasses import dataclass
from typing import Final, NamedTuple

from schemas.subjects import Lane

OVERCOMMIT: Final = 4
OWN_CREDIT: Final = 8
PULL_S: Final = 1.0
ROTATING_PULL_S: Final = 0.1
OWED_PULL_S: Final = 0.02
"""What is owed is asked for at one place at a time, and all may stand in one of 32. A request that
stands there comes at once."""
LOST_AFTER_S: Final = 0.5
FOREIGN_PAUSE_S: Final = 0.005
FOREIGN_PRIORITY: Final = 1
LOWEST_PRIORITY: Final = 9
BATCH_LOAD_MAX: Final = 0.5
BATCH_OWED_AFTER: Final = 20
"""So many requests of lane `online` go before one of lane `batch`: its share is what ingress owes
the class while others wait."""


class Place(NamedTuple):
    """A lane of a partition: what one consumer serves."""

    lane: Lane
    partition: int


class Pull(NamedTuple):
    """A request for messages; `token` comes back with its status."""

    token: str
    place: Place
    batch: int
    priority: int
    expires_s: float


@dataclass(slots=True)
class _Outstanding:
    place: Place
    remaining: int
    lost_s: float


class Credits:
    """Pulls on their way, and what to ask for next."""

    def __init__(self, *, slots: int, partitions: int) -> None:
        self.owned: frozenset[int] = frozenset()
        self.waiting: frozenset[Place] = frozenset()
        """Where requests wait, as far as somebody has looked."""
        self._slots = slots
        self._partitions = partitions
        self._pulls: dict[str, _Outstanding] = {}
        self._at: dict[Place, int] = {}
        self._not_before_s: dict[Place, float] = {}
        self._tokens = itertools.count()
        self._online = [Place("online", each) for each in range(partitions)]
        self._batch = [Place("batch", each) for each in range(partitions)]
        self._asked = dict.fromkeys((*self._online, *self._batch), -1)
        """When each place was asked last, counted in pulls."""
        self._batch_turn = 0
        self._since_batch = 0

    @property
    def outstanding(self) -> int:
        """How many requests the broker may still hand over."""
        return sum(self._at.values())

    def scarce(self, *, held: int) -> bool:
        """Tell whether there is less room than partitions: requests may wait where none is pulled
        while there is room."""
        return held < self._slots + OVERCOMMIT < self._partitions + held

    def plan(self, *, held: int, now_s: float) -> list[Pull]:
        """Return the pulls to send now, and note them as sent."""
        self._forget_lost(now_s)
        room = self._slots + OVERCOMMIT - held - self.outstanding
        if room <= 0:
            return []
        load = min(1.0, held / self._slots)
        online, batch = self._in_turn(self._online), self._in_turn(self._batch)
        rest = self._slots + OVERCOMMIT - held
        scarce = rest < len(online)
        others_wait = any(place.lane == "online" for place in self.waiting)
        owed: list[Place] = []
        if load >= BATCH_LOAD_MAX or others_wait:
            owed = self._owed(batch, scarce=scarce)
            places = [*owed, *online]
        elif scarce and not self.waiting:
            # Nobody waits, or too many to look at: what room is left would never reach the lane.
            places = [*self._next(batch), *online]
        else:
            places = [*online, *batch]
        # One for each partition, before any gets several; in turn, where room is too little.
        spare = (rest - len(places)) // max(1, len(self.owned))
        credit = 1 if scarce else max(1, min(OWN_CREDIT, 1 + spare))
        expires_s = ROTATING_PULL_S if scarce else PULL_S
        if scarce:
            places.sort(key=lambda place: place not in self.waiting)
        kept = rest // 2 if scarce else 0
        pulls = []
        for place in places:
            if room <= (0 if place in self.waiting else kept):
                break
            own = place.partition in self.owned
            several = own and place.lane == "online"
            count = min(self._wanted(place, credit if several else 1, now_s), room)
            if count <= 0:
                continue
            priority = 0 if own else _priority(load)
            lasts_s = OWED_PULL_S if place in owed else expires_s
            pulls.append(self._sent(place, count, priority, lasts_s, now_s))
            room -= count
        return pulls

    def _in_turn(self, lane: list[Place]) -> list[Place]:
        """Return the places of a lane: its own first, then who was asked longest ago, so that none
        waits behind a busier one for more than its turn."""
        own: list[Place] = []
        foreign: list[Place] = []
        for place in sorted(lane, key=self._asked.__getitem__):
            (own if place.partition in self.owned else foreign).append(place)
        return own + foreign

    def _owed(self, batch: list[Place], *, scarce: bool) -> list[Place]:
        """Return the place of lane `batch` to ask although the slots are busy; none if it is owed
        nothing or is asked already."""
        if self._since_batch < BATCH_OWED_AFTER:
            return []
        known = [place for place in batch if place in self.waiting]
        if known or (scarce and self.waiting):  # somebody has looked where requests wait
            return [] if self._asks_batch(batch) else known[:1]
        return self._next(batch)

    def _next(self, batch: list[Place]) -> list[Place]:
        """Return the next place of lane `batch` in turn; none while one is asked."""
        if self._asks_batch(batch):
            return []
        self._batch_turn += 1
        return [Place("batch", self._batch_turn % self._partitions)]

    def _asks_batch(self, batch: list[Place]) -> bool:
        return any(self._at.get(place) for place in batch)

    def _wanted(self, place: Place, credit: int, now_s: float) -> int:
        if now_s < self._not_before_s.get(place, 0.0):
            return 0
        there = self._at.get(place, 0)
        # Topped up in halves: a pull per delivered request would be as many messages again.
        return credit - there if there <= credit // 2 else 0

    def _sent(
        self, place: Place, batch: int, priority: int, expires_s: float, now_s: float
    ) -> Pull:
        number = next(self._tokens)
        token = f"{number:x}"
        self._asked[place] = number
        self._pulls[token] = _Outstanding(place, batch, now_s + expires_s + LOST_AFTER_S)
        self._at[place] = self._at.get(place, 0) + batch
        return Pull(token, place, batch, priority, expires_s)

    def delivered(self, place: Place, *, now_s: float) -> None:
        """Note a delivery: it used up one of the oldest pull at its place."""
        self._since_batch = 0 if place.lane == "batch" else self._since_batch + 1
        if place.partition not in self.owned:
            # A few milliseconds for the owner to take the next one of this prefix.
            self._not_before_s[place] = now_s + FOREIGN_PAUSE_S
        for token, pull in self._pulls.items():
            if pull.place == place:
                self._use(token, pull, 1)
                return

    def ended(self, token: str) -> Place | None:
        """Note that the broker closed a pull; return where, None if it was used up before."""
        pull = self._pulls.get(token)
        if pull is None:
            return None
        self._use(token, pull, pull.remaining)
        return pull.place

    def pause(self, place: Place, *, until_s: float) -> None:
        """Ask for nothing there before that time."""
        self._not_before_s[place] = max(until_s, self._not_before_s.get(place, 0.0))

    def reset(self) -> None:
        """Forget all pulls: the broker does not know them any more."""
        self._pulls.clear()
        self._at.clear()

    def _forget_lost(self, now_s: float) -> None:
        # A restarted broker, or a stream made anew, drops pulls without a word.
        for token, pull in list(self._pulls.items()):
            if pull.lost_s < now_s:
                self._use(token, pull, pull.remaining)

    def _use(self, token: str, pull: _Outstanding, count: int) -> None:
        pull.remaining -= count
        self._at[pull.place] -= count
        if pull.remaining <= 0:
            del self._pulls[token]


def _priority(load: float) -> int:
    return min(LOWEST_PRIORITY, FOREIGN_PRIORITY + int(load * (LOWEST_PRIORITY - 1)))
