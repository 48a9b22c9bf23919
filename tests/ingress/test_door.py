"""The door: nobody goes through twice, and who has gone through is counted until it has landed."""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ingress.admission import FairQueue, Ticket
from ingress.door import Door

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
TestPassing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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
