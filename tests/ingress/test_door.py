"""The door: nobody goes through twice, and who has gone through is counted until it has landed."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ingress.admission import FairQueue, Ticket
from ingress.door import Door
from ingress.waiting import STANDING_S_MIN, STANDING_SHARE

SLOTS = 16
WATERMARK = 4
PATIENCE_S = 30.0


def ticket(request: str, *, cost: int = 100, at_s: float = 0.0) -> Ticket:
    return Ticket(request, "a", "standard", 1, cost, cost, 10, at_s, at_s + PATIENCE_S)


class Passing(RuleBasedStateMachine):
    """Requests that wait or pass, are on their way, are stored and end, as the broker counts."""

    def __init__(self) -> None:
        super().__init__()
        self.door = Door(FairQueue())
        self.number = 0
        self.on_their_way = 0
        self.stored = 0
        self.asked: list[tuple[int, int]] = []  # the broker's counts that have not come yet

    @rule()
    def arrive(self) -> None:
        self.number += 1
        if self.door.is_open(WATERMARK):
            self.door.pass_on(ticket(str(self.number)))
            self.on_their_way += 1
        else:
            assert self.door.queue.offer(ticket(str(self.number))) is None

    @rule(is_stored=st.booleans())
    def land(self, is_stored: bool) -> None:
        if self.on_their_way:
            self.on_their_way -= 1
            self.stored += is_stored
            self.door.landed += 1

    @rule()
    def end(self) -> None:
        self.stored -= self.stored > 0

    @rule()
    def withdraw(self) -> None:
        self.door.queue.withdraw(str(self.number))

    @rule()
    def ask(self) -> None:
        self.asked.append((self.door.landed, self.stored))

    @rule()
    def count(self) -> None:
        if self.asked:
            landed, stored = self.asked.pop(0)
            self.door.count(stored, ended=0, landed=landed, slots=2, now_s=0.0)

    @rule()
    def release(self) -> None:
        through = list(self.door.release(WATERMARK, now_s=0.0))
        assert len({each.request for each in through}) == len(through)
        self.on_their_way += len(through)

    @invariant()
    def those_on_their_way_are_counted(self) -> None:
        assert self.door.behind >= self.on_their_way

    def teardown(self) -> None:
        """Once all have landed and are counted the door is open again, whatever came before."""
        while self.door.queue.next() is not None:
            pass
        self.door.landed += self.on_their_way
        self.door.count(0, ended=0, landed=self.door.landed, slots=2, now_s=0.0)
        assert self.door.behind == 0
        assert self.door.quiet
        assert self.door.is_open(WATERMARK)


TestPassing = Passing.TestCase
TestPassing.settings = settings(max_examples=60, stateful_step_count=40)


def crowd(door: Door, *, cost_of: Callable[[int], int] = lambda n: 100) -> float:
    """Have 1,000 requests wait and let 20 a second through; return when none waits any more."""
    for n in range(1000):
        assert door.queue.offer(ticket(f"crowd-{n}", cost=cost_of(n))) is None
    ended, now_s = 0, 0.0
    while door.queue.depth:
        door.count(WATERMARK - 1, ended=ended, landed=ended, slots=2, now_s=now_s)
        ended += len(list(door.release(WATERMARK, now_s=now_s)))
        now_s += 0.05
    door.count(0, ended=ended, landed=ended, slots=2, now_s=now_s)
    return now_s


def test_right_after_a_crowd_has_drained_nobody_is_refused_for_it() -> None:
    door = Door(FairQueue())
    now_s = crowd(door)
    assert door.quiet
    for _ in range(2 * WATERMARK):
        late = ticket(f"late-{door.behind}", at_s=now_s)
        assert door.foreseen_s(late, slots=2, now_s=now_s) is None
        if door.is_open(WATERMARK):
            door.pass_on(late)


def test_after_a_crowd_of_short_requests_a_few_long_ones_are_not_refused() -> None:
    door = Door(FairQueue())
    now_s = crowd(door, cost_of=lambda n: 10)
    for n in range(12):
        late = ticket(f"late-{n}", cost=32_000, at_s=now_s)
        assert door.foreseen_s(late, slots=2, now_s=now_s) is None
        if door.is_open(WATERMARK):
            door.pass_on(late)
        else:
            door.queue.offer(late)
    assert door.queue.depth == 12 - WATERMARK


def test_while_a_crowd_waits_who_comes_last_is_told_how_long() -> None:
    door = Door(FairQueue())
    now_s = crowd(door)
    for n in range(1000):
        door.queue.offer(ticket(f"again-{n}"))
    foreseen_s = door.foreseen_s(ticket("last", at_s=now_s), slots=2, now_s=now_s)
    assert foreseen_s is not None
    assert 45 <= foreseen_s <= 55


@dataclass
class House:
    """Slots behind a door, and two tenants before it, by a simulated clock."""

    service_s: float
    patience_s: float
    tick_s: float
    door: Door = field(default_factory=lambda: Door(FairQueue()))
    now_s: float = 0.0
    ended: int = 0
    running: list[float] = field(default_factory=list)
    behind: list[Ticket] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    busy: list[int] = field(default_factory=list)

    def watermark(self) -> int:
        standing_s = max(STANDING_S_MIN, STANDING_SHARE * self.patience_s)
        return self.door.watermark(2 * SLOTS, slots=SLOTS, standing_s=standing_s, now_s=self.now_s)

    def tick(self, dice: random.Random) -> None:
        """Let end who is done, begin who stands next, read and let go."""
        done = sum(until_s <= self.now_s for until_s in self.running)
        self.running = sorted(self.running)[done:]
        self.ended += done
        while self.behind and len(self.running) < SLOTS:
            self.behind.pop(0)
            self.running.append(self.now_s + self.service_s * dice.uniform(0.5, 1.5))
        stored = len(self.behind) + len(self.running)
        self.door.count(
            stored, ended=self.ended, landed=self.door.landed, slots=SLOTS, now_s=self.now_s
        )
        for ticket in self.door.release(self.watermark(), now_s=self.now_s):
            self.store(ticket)
        for ticket in self.door.queue.expire(now_s=self.now_s):
            self.refused[ticket.tenant] += 1
        self.busy.append(len(self.running))
        self.now_s += self.tick_s

    def store(self, ticket: Ticket) -> None:
        self.door.landed += 1
        self.behind.append(ticket)
        self.taken[ticket.tenant] += 1

    def ask(self, tenant: str, number: int) -> None:
        until_s = self.now_s + self.patience_s
        one = Ticket(f"{number}", tenant, "standard", 1, 9, 9, 9, self.now_s, until_s)
        if self.door.foreseen_s(one, slots=SLOTS, now_s=self.now_s) is not None:
            self.refused[tenant] += 1
        elif self.door.is_open(self.watermark()):
            self.door.pass_on(one)
            self.store(one)
        else:
            self.door.queue.offer(one)


@pytest.mark.parametrize(("service_s", "patience_s"), [(40.0, 30.0), (0.5, 0.2), (0.5, 2.0)])
def test_a_loud_tenant_takes_nothing_of_a_quiet_ones_share_however_long_answers_take(
    service_s: float, patience_s: float
) -> None:
    house = House(service_s, patience_s, tick_s=service_s / 100)
    dice, ticks = random.Random(1), 3000
    for n in range(ticks):
        house.tick(dice)
        house.ask("loud", n)  # over six times what the slots can do
        if n % 50 == 25:  # a tenth of it
            house.ask("quiet", -n)
    assert house.refused["loud"] > 0.7 * ticks
    assert house.refused["quiet"] <= 1
    busy = house.busy[ticks // 3 :]
    assert sum(busy) >= 0.98 * SLOTS * len(busy)
