"""How long one would wait: what is there, nothing unmeasured; and a whole system by the clock."""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingress.admission import FairQueue, Order, Ticket
from ingress.forecast import SPANS_MAX, Drain, Forecast, Reading, retry_after_s
from schemas.tenant import PriorityClass

SLOTS = 4
SERVICE_S = 0.5
PER_S = SLOTS / SERVICE_S
READ_S = 0.01
COST = 100


def ticket(
    request: str,
    tenant: str = "a",
    priority_class: PriorityClass = "standard",
    *,
    cost: int = COST,
    at_s: float = 0.0,
    weight: int = 1,
    patience_s: float = 30.0,
) -> Ticket:
    return Ticket(
        request, tenant, priority_class, weight, cost, cost, 10, at_s, at_s + patience_s, None
    )


def reading(at_s: float, **more: int) -> Reading:
    values = {"slots": SLOTS, "behind": 2 * SLOTS, "ended": 0, "waiting": 10, "let_go": 0}
    values |= more
    return Reading(at_s, let_go_tokens=COST * values["let_go"], **values)


def measured(*, seconds: float = 2.0) -> Forecast:
    """What is known after some time in which eight requests a second were done."""
    forecast = Forecast()
    for tenth in range(round(10 * seconds) + 1):
        done = round(tenth / 10 * PER_S)
        forecast.read(reading(tenth / 10, ended=done, let_go=done))
    return forecast


def waited_s(
    forecast: Forecast,
    *,
    now_s: float,
    behind: int,
    ahead_tokens: float,
    waiting: int = 10_000,
    slots: int = SLOTS,
) -> float:
    return forecast.wait_s(
        now_s=now_s, slots=slots, behind=behind, waiting=waiting, ahead_tokens=ahead_tokens
    )


def test_the_wait_is_what_goes_before_over_how_fast_it_leaves() -> None:
    forecast = measured()
    assert waited_s(forecast, now_s=2.0, behind=SLOTS, ahead_tokens=0) == 0
    behind_s = waited_s(forecast, now_s=2.0, behind=SLOTS + 8, ahead_tokens=0)
    assert behind_s == pytest.approx(8 / PER_S)
    both_s = waited_s(forecast, now_s=2.0, behind=SLOTS + 8, ahead_tokens=80 * COST)
    assert both_s == pytest.approx(88 / PER_S)


def test_time_since_the_count_is_taken_off() -> None:
    wait_s = waited_s(measured(), now_s=2.25, behind=SLOTS + 8, ahead_tokens=0)
    assert wait_s == pytest.approx(8 / PER_S - 0.25)


def test_without_a_whole_turn_of_the_slots_nothing_is_foreseen() -> None:
    forecast = measured(seconds=0.3)
    assert waited_s(forecast, now_s=0.3, behind=10_000, ahead_tokens=1e9) == 0


def test_before_any_reading_nothing_is_foreseen() -> None:
    assert waited_s(Forecast(), now_s=1.0, behind=10_000, ahead_tokens=1e9) == 0


def test_without_workers_nothing_is_foreseen() -> None:
    forecast = measured()
    forecast.read(reading(2.1, slots=0, ended=16, let_go=16))
    assert waited_s(forecast, now_s=2.1, behind=10_000, ahead_tokens=1e9) == 0


def test_with_more_slots_than_were_measured_nothing_is_foreseen() -> None:
    forecast = measured()
    more = {"slots": 2 * SLOTS}
    assert waited_s(forecast, now_s=2.0, behind=10_000, ahead_tokens=1e9, **more) == 0
    forecast.read(reading(2.1, ended=16, let_go=16, **more))
    assert waited_s(forecast, now_s=2.1, behind=10_000, ahead_tokens=1e9, **more) == 0


def test_before_a_reading_tells_that_all_workers_are_gone_nothing_is_foreseen() -> None:
    assert waited_s(measured(), now_s=2.0, behind=10_000, ahead_tokens=1e9, slots=0) == 0


def test_where_few_wait_their_number_bounds_the_wait_whatever_tokens_they_may_make() -> None:
    forecast = measured()
    few_s = waited_s(forecast, now_s=2.0, behind=SLOTS, waiting=3, ahead_tokens=3 * 32_000)
    assert few_s == pytest.approx(3 / PER_S)
    many_s = waited_s(forecast, now_s=2.0, behind=SLOTS, waiting=40, ahead_tokens=40 * COST)
    assert many_s == pytest.approx(40 / PER_S)


def test_busy_time_without_an_end_is_not_kept_for_ever() -> None:
    drain = Drain()
    for n in range(SPANS_MAX):
        drain.note(now_s=n, length_s=0.1, requests=n < 16, units=n < 16, turn=16)
    assert drain.rates(now_s=SPANS_MAX, turn=16) is not None
    drain.note(now_s=SPANS_MAX, length_s=0.1, requests=0, units=0, turn=16)
    assert drain.rates(now_s=SPANS_MAX, turn=16) is None


def test_readings_that_come_often_are_kept_together() -> None:
    often, seldom = Drain(), Drain()
    for n in range(100 * SPANS_MAX // 10):
        often.note(now_s=n / 1000, length_s=0.001, requests=1, units=2, turn=10**6)
        if n % 100 == 99:
            seldom.note(now_s=n / 1000, length_s=0.1, requests=100, units=200, turn=10**6)
    for drain in (often, seldom):
        assert drain.rates(now_s=100, turn=16) == pytest.approx((1000, 2000))


def test_what_was_measured_long_ago_is_forgotten() -> None:
    assert waited_s(measured(), now_s=63.0, behind=10_000, ahead_tokens=1e9) == 0


def test_idle_time_does_not_count_as_slowness() -> None:
    forecast = measured()
    for tenth in range(21, 100):  # one a second, of which there was no more
        done = 16 + (tenth - 20) // 10
        forecast.read(reading(tenth / 10, behind=1, ended=done, waiting=0, let_go=done))
    wait_s = waited_s(forecast, now_s=9.9, behind=SLOTS + 8, ahead_tokens=0)
    assert wait_s == pytest.approx(8 / PER_S, rel=0.06)  # the last 0.1 s that were busy ended none


def test_who_is_refused_comes_again_when_it_would_wait_as_long_as_it_may() -> None:
    told = [retry_after_s(wait_s=wait_s, allowed_s=30) for wait_s in (1000, 75, 40.2, 30.1)]
    assert told == [60, 45, 11, 1]


def test_a_quiet_tenant_has_nobody_before_it_whatever_a_loud_one_has_waiting() -> None:
    queue = FairQueue()
    for n in range(1000):
        queue.offer(ticket(f"n{n}", "loud"))
    for _ in range(3):
        queue.next()
    assert queue.ahead_tokens(ticket("mine", "quiet")) <= COST
    assert queue.ahead_tokens(ticket("more", "loud")) == 997 * COST


def test_a_tenant_that_was_served_beyond_its_share_waits_for_what_others_get_until_then() -> None:
    queue = FairQueue()
    queue.offer(ticket("first", "mine", cost=400))
    for n in range(100):
        queue.offer(ticket(f"n{n}", "loud"))
    queue.next()
    foreseen = queue.ahead_tokens(mine := ticket("mine", "mine", cost=400))
    queue.offer(mine)
    in_fact = 0
    while (found := queue.next()) is not None and found.request != "mine":
        in_fact += found.cost_tokens
    assert 4 * COST <= foreseen <= in_fact


def test_a_lower_class_waits_for_those_above_as_far_as_it_is_owed_no_share() -> None:
    queue = FairQueue()
    for n in range(20):
        queue.offer(ticket(f"i{n}", "loud", "interactive"))
    queue.offer(ticket("s", "other"))
    assert queue.ahead_tokens(ticket("mine", "mine", "standard")) == pytest.approx(11 * COST)
    assert queue.ahead_tokens(ticket("i", "mine", "interactive")) <= 2 * COST


offers = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["interactive", "standard", "batch"]),
        st.integers(1, 500),
    ),
    max_size=60,
)
WEIGHTS = {"a": 1, "b": 2, "c": 3}


@given(offers, st.sampled_from(Order), st.sampled_from(["interactive", "standard", "batch"]))
def test_one_more_that_waits_never_makes_a_wait_shorter(
    others: list[tuple[str, PriorityClass, int]], order: Order, name: PriorityClass
) -> None:
    queue = FairQueue(order=order)
    mine = ticket("mine", "a", name, at_s=1.0)
    assert queue.ahead_tokens(mine) == 0
    before = 0.0
    for number, (tenant, other, cost) in enumerate(others):
        queue.offer(ticket(f"r{number}", tenant, other, cost=cost, weight=WEIGHTS[tenant]))
        ahead = queue.ahead_tokens(mine)
        assert before - 1e-6 <= ahead <= queue.tokens + 1e-6
        before = ahead


@given(offers, st.integers(0, 30))
def test_no_more_is_foreseen_than_is_served_before_it_in_fact(
    others: list[tuple[str, PriorityClass, int]], served: int
) -> None:
    queue = FairQueue(order=Order.FCFS)
    for number, (tenant, _, cost) in enumerate(others):
        queue.offer(ticket(f"r{number}", tenant, cost=cost, weight=WEIGHTS[tenant]))
    for _ in range(served):
        queue.next()
    mine = ticket("mine", "a", at_s=1.0)
    ahead = queue.ahead_tokens(mine)
    queue.offer(mine)
    in_fact = 0
    while (found := queue.next()) is not None and found.request != "mine":
        in_fact += found.cost_tokens
    # Of each other tenant as much may be counted too much as it gets while one is served here.
    assert ahead - COST * (WEIGHTS["b"] + WEIGHTS["c"]) <= in_fact


@given(st.integers(0, 500), st.integers(0, 500), st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_wait_grows_with_what_goes_before(
    behind: int, more: int, tokens: float, more_tokens: float
) -> None:
    forecast = measured()
    less_s = waited_s(forecast, now_s=2.0, behind=behind, ahead_tokens=tokens)
    wait_s = waited_s(forecast, now_s=2.0, behind=behind + more, ahead_tokens=tokens + more_tokens)
    assert wait_s >= less_s >= 0


@dataclass
class System:
    """Slots, a queue behind the door and one before it, by a simulated clock."""

    patience_s: float
    slots: int = 16
    now_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    refused: int = 0
    ended: int = 0
    busy_by_second: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.queue, self.forecast = FairQueue(), Forecast()
        self.behind: list[Ticket] = []
        self.running: list[float] = []
        self.let_go = 0

    def arrive(self, request: Ticket) -> None:
        is_open = not self.queue.depth and self.stored < 2 * self.slots
        ahead = 0.0 if is_open else self.queue.ahead_tokens(request)
        wait_s = self.forecast.wait_s(
            now_s=self.now_s,
            slots=self.slots,
            behind=self.stored,
            waiting=self.queue.depth,
            ahead_tokens=ahead,
        )
        if wait_s > self.patience_s:
            self.refused += 1
        elif is_open:
            self.pass_on(request)
        else:
            assert self.queue.offer(request) is None

    def pass_on(self, request: Ticket) -> None:
        self.let_go += 1
        self.behind.append(request)
        self.start()

    def start(self) -> None:
        while self.behind and len(self.running) < self.slots:
            self.waits_s.append(self.now_s - self.behind.pop(0).arrived_s)
            heapq.heappush(self.running, self.now_s + SERVICE_S)

    @property
    def stored(self) -> int:
        return len(self.behind) + len(self.running)

    def tick(self) -> None:
        """Let end who is done; read and let go, as a node does."""
        self.busy_by_second[int(self.now_s)] += len(self.running)
        while self.running and self.running[0] <= self.now_s:
            heapq.heappop(self.running)
            self.ended += 1
        self.start()
        self.forecast.read(
            Reading(
                self.now_s,
                self.slots,
                self.stored,
                self.ended,
                self.queue.depth,
                self.let_go,
                COST * self.let_go,
            )
        )
        while self.stored < 2 * self.slots and (request := self.queue.next()) is not None:
            self.pass_on(request)

    def load(self, *, share: float, seconds: float, seed: int) -> None:
        dice = random.Random(seed)
        until_s, number = self.now_s + seconds, 0
        next_s = self.now_s
        while self.now_s < until_s:
            self.tick()
            while next_s <= self.now_s:
                number += 1
                self.arrive(ticket(f"{seed}-{number}", at_s=next_s, patience_s=self.patience_s))
                next_s += dice.expovariate(share * self.slots / SERVICE_S)
            self.now_s += READ_S


@settings(max_examples=10)
@given(st.sampled_from([0.2, 0.5, 2.0, 5.0]), st.integers(0, 1000))
def test_beyond_capacity_waits_keep_the_patience_and_slots_stay_busy(
    patience_s: float, seed: int
) -> None:
    system = System(patience_s)
    system.load(share=1.5, seconds=60, seed=seed)
    waits_s = sorted(system.waits_s[len(system.waits_s) // 4 :])
    # Slots become free in clumps, not evenly over a service time.
    assert waits_s[int(0.95 * len(waits_s))] <= 1.25 * patience_s + SERVICE_S / 4
    ticks = round(1 / READ_S)
    busy = [system.busy_by_second[second] / ticks / system.slots for second in range(5, 59)]
    assert sum(busy) / len(busy) >= 0.98
    # It does not swing; within one second so few may come that slots stay free.
    assert min(map(sum, itertools.pairwise(busy))) >= 2 * 0.85
    assert system.refused >= 0.25 * (system.refused + len(system.waits_s))


def test_below_capacity_nobody_is_refused() -> None:
    system = System(0.5)
    system.load(share=0.8, seconds=60, seed=1)
    assert system.refused == 0


def test_once_the_load_is_gone_nobody_is_refused_any_more() -> None:
    system = System(0.5)
    system.load(share=3.0, seconds=20, seed=1)
    assert system.refused
    system.load(share=0.0001, seconds=2, seed=2)
    before = system.refused
    system.load(share=0.7, seconds=30, seed=3)
    assert system.refused == before
