"""Who goes next: classes, weights, a tenant's own order, bounds, and nobody starves."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingress.admission import DrainRate, FairQueue, Order, Ticket
from ingress.holding import Bounds, Full, Held, Holding
from schemas.tenant import PriorityClass


def ticket(
    name: str,
    tenant: str = "a",
    priority_class: PriorityClass = "standard",
    *,
    weight: int = 1,
    cost: int = 100,
    output: int = 50,
    at_s: float = 0.0,
    patience_s: float = 1e9,
    tenant_max: int | None = None,
    prompt_bytes: int = 10,
) -> Ticket:
    return Ticket(
        name,
        tenant,
        priority_class,
        weight,
        cost,
        output,
        prompt_bytes,
        at_s,
        at_s + patience_s,
        tenant_max,
    )


def drained(queue: FairQueue) -> list[str]:
    served = []
    while (found := queue.next()) is not None:
        served.append(found.request)
    return served


def test_an_empty_queue_has_nobody() -> None:
    assert FairQueue().next() is None


def test_one_request_of_a_quiet_tenant_goes_before_a_thousand_of_a_loud_one() -> None:
    queue = FairQueue()
    for n in range(1000):
        assert queue.offer(ticket(f"a{n}", "a")) is None
    for _ in range(10):
        queue.next()
    queue.offer(ticket("b", "b"))
    assert "b" in [queue.next().request, queue.next().request]  # type: ignore[union-attr]


@pytest.mark.parametrize(("cost_a", "cost_b"), [(100, 100), (300, 100), (50, 700)])
def test_tokens_are_shared_by_weight_whatever_a_request_costs(cost_a: int, cost_b: int) -> None:
    queue = FairQueue()
    for n in range(3000):
        queue.offer(ticket(f"a{n}", "a", weight=3, cost=cost_a))
        queue.offer(ticket(f"b{n}", "b", weight=1, cost=cost_b))
    tokens: Counter[str] = Counter()
    while sum(tokens.values()) < 200_000:
        served = queue.next()
        assert served is not None
        tokens[served.tenant] += served.cost_tokens
    assert tokens["a"] / tokens["b"] == pytest.approx(3, rel=0.05)


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    queue = FairQueue()
    for n in range(100):
        queue.offer(ticket(f"a{n}", "a"))
    for _ in range(50):
        queue.next()
    for n in range(100):
        queue.offer(ticket(f"b{n}", "b"))
    served = Counter(name[0] for name in drained(queue)[:40])
    assert served["a"] == pytest.approx(20, abs=1)


def test_classes_are_strict_but_lower_ones_get_their_share() -> None:
    queue = FairQueue()
    for n in range(1000):
        queue.offer(ticket(f"i{n}", "a", "interactive"))
        queue.offer(ticket(f"s{n}", "a", "standard"))
        queue.offer(ticket(f"b{n}", "a", "batch"))
    assert queue.next().request == "i0"  # type: ignore[union-attr]
    served = Counter(name[0] for name in drained(queue)[:600])
    assert served["s"] / (served["i"] + served["b"]) == pytest.approx(0.1, rel=0.1)
    assert served["b"] / (served["i"] + served["s"]) == pytest.approx(0.05, rel=0.1)


def test_a_class_gets_no_more_than_its_share_by_asking_for_one_after_another() -> None:
    queue = FairQueue()
    for n in range(1000):
        queue.offer(ticket(f"i{n}", "a", "interactive"))
    served: Counter[str] = Counter()
    for n in range(600):
        if not queue.depths["standard"]:
            queue.offer(ticket(f"s{n}", "b", "standard"))
        found = queue.next()
        assert found is not None
        served[found.tenant] += 1
    assert served["b"] / served["a"] == pytest.approx(0.1, rel=0.1)


def test_a_class_that_is_back_after_what_it_took_too_much_waits_no_longer_than_others() -> None:
    queue = FairQueue()
    for n in range(100):
        queue.offer(ticket(f"i{n}", "a", "interactive"))
    queue.offer(ticket("s0", "b", "standard"))
    served = [queue.next().request for _ in range(40)]  # type: ignore[union-attr]
    assert "s0" in served[:2]
    queue.offer(ticket("s1", "b", "standard"))
    assert "s1" in [queue.next().request for _ in range(2)]  # type: ignore[union-attr]


def test_a_class_that_was_first_for_long_owes_nothing_for_it() -> None:
    queue = FairQueue()
    for n in range(500):
        queue.offer(ticket(f"s{n}", "a", "standard"))
    for _ in range(100):
        queue.next()
    for n in range(100):
        queue.offer(ticket(f"i{n}", "b", "interactive"))
    assert "s" in [name[0] for name in drained(queue)[:12]]


def test_first_come_first_served() -> None:
    queue = FairQueue(order=Order.FCFS)
    for n, output in enumerate([900, 5, 300]):
        queue.offer(ticket(f"r{n}", output=output, at_s=n))
    assert drained(queue) == ["r0", "r1", "r2"]


def test_shortest_first() -> None:
    queue = FairQueue(order=Order.SJF)
    for n, output in enumerate([900, 5, 300]):
        queue.offer(ticket(f"r{n}", output=output, at_s=n))
    assert drained(queue) == ["r1", "r2", "r0"]


def test_hybrid_lets_a_short_one_overtake_but_none_that_came_much_earlier() -> None:
    queue = FairQueue()
    queue.offer(ticket("long", output=1000, at_s=0.0))
    queue.offer(ticket("short, soon after", output=10, at_s=1.0))
    queue.offer(ticket("short, much later", output=10, at_s=11.0))
    assert drained(queue) == ["short, soon after", "long", "short, much later"]


def _mean_and_worst_wait_s(order: Order) -> tuple[float, float]:
    """Serve a mixed load at one token per 10 ms, arriving a little faster than it is served."""
    arrivals = [(n * 1.0, 400 if n % 4 == 0 else 20) for n in range(200)]
    queue, now_s, waits, n = FairQueue(order=order), 0.0, [], 0
    while n < len(arrivals) or queue.depth:
        while n < len(arrivals) and arrivals[n][0] <= now_s:
            queue.offer(ticket(f"r{n}", output=arrivals[n][1], at_s=arrivals[n][0]))
            n += 1
        served = queue.next()
        if served is None:
            now_s = arrivals[n][0]
            continue
        waits.append(now_s - served.arrived_s)
        now_s += served.output_tokens * 0.01
    return sum(waits) / len(waits), max(waits)


def test_hybrid_waits_less_than_first_come_on_average_without_starving_long_ones() -> None:
    fcfs_mean_s, fcfs_worst_s = _mean_and_worst_wait_s(Order.FCFS)
    hybrid_mean_s, hybrid_worst_s = _mean_and_worst_wait_s(Order.HYBRID)
    sjf_mean_s, sjf_worst_s = _mean_and_worst_wait_s(Order.SJF)
    assert sjf_mean_s <= hybrid_mean_s < fcfs_mean_s
    # A long one yields to what comes within its 400 tokens' 4 s, and to no more.
    assert hybrid_worst_s <= fcfs_worst_s + 4.0
    assert sjf_worst_s > hybrid_worst_s


def test_a_tenants_own_bound_is_told_from_the_queues() -> None:
    queue = FairQueue(holding=Holding(Bounds(requests_max=10)))
    outcomes = [queue.offer(ticket(f"a{n}", "a", tenant_max=3)) for n in range(4)]
    assert outcomes == [None, None, None, Full.TENANT]
    outcomes = [queue.offer(ticket(f"b{n}", "b", "interactive")) for n in range(8)]
    assert outcomes == [None] * 6 + [Full.QUEUE] * 2


def test_low_classes_are_held_back_before_the_queue_is_full() -> None:
    queue = FairQueue(holding=Holding(Bounds(requests_max=100)))
    for n in range(50):
        assert queue.offer(ticket(f"b{n}", f"a{n}", "batch")) is None
    assert queue.offer(ticket("b", "b", "batch")) is Full.QUEUE
    for n in range(40):
        assert queue.offer(ticket(f"s{n}", f"a{n}", "standard")) is None
    assert queue.offer(ticket("s", "b", "standard")) is Full.QUEUE
    for n in range(10):
        assert queue.offer(ticket(f"i{n}", f"a{n}", "interactive")) is None
    assert queue.offer(ticket("i", "b", "interactive")) is Full.QUEUE


def test_prompts_are_bounded_by_their_bytes() -> None:
    queue = FairQueue(holding=Holding(Bounds(bytes_max=1000)))
    assert queue.offer(ticket("one", prompt_bytes=800)) is None
    assert queue.offer(ticket("two", prompt_bytes=200)) is Full.QUEUE
    queue.withdraw("one")
    assert queue.offer(ticket("two", prompt_bytes=200)) is None


def test_who_has_waited_too_long_is_taken_out() -> None:
    queue = FairQueue()
    queue.offer(ticket("early", at_s=0, patience_s=30))
    queue.offer(ticket("late", at_s=10, patience_s=30))
    assert queue.expire(now_s=29.9) == []
    assert [expired.request for expired in queue.expire(now_s=30)] == ["early"]
    assert drained(queue) == ["late"]
    assert queue.expire(now_s=99) == []


def test_a_queue_that_everybody_left_holds_nothing() -> None:
    holding = Holding()
    queue = FairQueue(holding=holding)
    for n in range(1000):
        queue.offer(ticket(f"r{n}", f"t{n % 7}"))
    assert all(queue.withdraw(f"r{n}") for n in range(1000))
    assert not queue.withdraw("r0")
    assert (queue.depth, queue.next()) == (0, None)
    assert holding == Holding()


events = st.lists(
    st.tuples(
        st.sampled_from(["offer", "next", "withdraw", "expire"]),
        st.integers(0, 40),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["interactive", "standard", "batch"]),
        st.integers(1, 500),
        st.integers(1, 5),
    ),
    max_size=150,
)


@given(events, st.sampled_from(Order))
def test_whatever_happens_everybody_is_served_once_or_told(
    steps: list[tuple[str, int, str, PriorityClass, int, int]], order: Order
) -> None:
    holding = Holding(Bounds(requests_max=20))
    queue = FairQueue(order=order, holding=holding)
    waiting: set[str] = set()
    for number, (kind, which, tenant, name, cost, weight) in enumerate(steps):
        match kind:
            case "offer":
                request = f"r{number}"
                offered = ticket(request, tenant, name, weight=weight, cost=cost, output=cost)
                if queue.offer(offered) is None:
                    waiting.add(request)
            case "next":
                served = queue.next()
                assert (served is None) == (not waiting)
                if served is not None:
                    waiting.remove(served.request)
            case "withdraw":
                request = f"r{which}"
                assert queue.withdraw(request) == (request in waiting)
                waiting.discard(request)
            case "expire":
                assert queue.expire(now_s=1.0) == []
        assert queue.depth == len(waiting)
    rest = drained(queue)
    assert len(rest) == len(set(rest))
    assert set(rest) == waiting
    assert (holding.total, holding.tenants) == (Held(), {})


@given(st.integers(1, 400), st.integers(1, 5), st.integers(1, 5))
def test_no_tenant_starves_whatever_the_others_bring(cost: int, mine: int, theirs: int) -> None:
    queue = FairQueue()
    queue.offer(ticket("mine", "me", "batch", weight=mine, cost=500))
    for n in range(400):
        queue.offer(ticket(f"n{n}", "them", "interactive", weight=theirs, cost=cost))
        served = queue.next()
        assert served is not None
        if served.request == "mine":
            return
    raise AssertionError("never served")


def test_the_wait_shrinks_as_the_queue_drains() -> None:
    rate = DrainRate()
    assert rate.wait_s(10, now_s=0) == 60
    for n in range(100):
        rate.left(now_s=n * 0.1)
    waits = [rate.wait_s(ahead, now_s=10.0) for ahead in (400, 200, 50, 0)]
    assert waits == [40, 20, 5, 1]


@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 3), st.integers(1, 200), st.integers(0, 9)
        ),
        min_size=1,
        max_size=30,
    ),
    served=st.integers(0, 10),
    withdrawn=st.sets(st.integers(0, 29)),
    order=st.sampled_from(Order),
)
def test_as_many_go_before_a_request_as_are_said_to_be_ahead_of_it(
    asked: list[tuple[str, int, int, int]], served: int, withdrawn: set[int], order: Order
) -> None:
    queue = FairQueue(order=order)
    for number, (tenant, weight, cost, at_s) in enumerate(asked):
        queue.offer(ticket(str(number), tenant, weight=weight, cost=cost, output=cost, at_s=at_s))
    for _ in range(served):
        queue.next()
    for number in withdrawn:
        queue.withdraw(str(number))
    said = {each.request: queue.ahead_of(each) for each in queue.tickets}
    assert said == {request: place for place, request in enumerate(drained(queue))}


def test_those_of_higher_classes_are_ahead() -> None:
    queue = FairQueue()
    queue.offer(ticket("low", priority_class="batch"))
    queue.offer(ticket("high", priority_class="interactive"))
    assert [queue.ahead_of(each) for each in queue.tickets] == [1, 0]
    assert queue.depths == {"interactive": 1, "standard": 0, "batch": 1}
