"""Whom a node still takes in: bounds in all, and room left for who has nothing here yet."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ingress.admission import FairQueue, Ticket
from ingress.holding import Bounds, Full, Holding
from schemas.tenant import PriorityClass

NUMBERS = itertools.count()


def full_for(
    holding: Holding, tenant: str, name: PriorityClass = "interactive", *, prompt_bytes: int = 1
) -> Full | None:
    return holding.full_for(tenant, name, prompt_bytes=prompt_bytes, tenant_max=None)


def fill(holding: Holding, tenant: str, *, prompt_bytes: int = 1) -> int:
    """Have a tenant's requests wait until one is refused; return how many do."""
    for taken in itertools.count():
        if full_for(holding, tenant, prompt_bytes=prompt_bytes) is not None:
            return taken
        holding.take(tenant, prompt_bytes=prompt_bytes)
    raise AssertionError


def test_one_tenant_alone_may_hold_four_fifths() -> None:
    assert fill(Holding(Bounds(requests_max=1000)), "a") == 800
    assert fill(Holding(Bounds(bytes_max=100_100)), "a", prompt_bytes=100) == 801


@given(
    st.integers(1, 4),
    st.sampled_from([Bounds(requests_max=10_000), Bounds(bytes_max=10_000)]),
    st.integers(1, 5),
)
def test_who_has_nothing_here_is_taken_while_others_flood_it(
    floods: int, bounds: Bounds, prompt_bytes: int
) -> None:
    holding = Holding(bounds)
    for number in range(floods):
        assert fill(holding, f"{number}", prompt_bytes=prompt_bytes) > 0
    assert full_for(holding, "0", prompt_bytes=prompt_bytes) is Full.QUEUE
    assert full_for(holding, "new", prompt_bytes=prompt_bytes) is None
    assert holding.total.requests <= bounds.requests_max
    assert holding.total.prompt_bytes <= bounds.bytes_max


def test_of_a_full_node_what_becomes_free_goes_to_who_has_less() -> None:
    holding = Holding(Bounds(requests_max=100))
    for tenant in "abcd":
        fill(holding, tenant)
    assert full_for(holding, "new") is Full.QUEUE
    holding.release("a", prompt_bytes=1)
    assert full_for(holding, "a") is Full.QUEUE
    assert full_for(holding, "new") is None


def test_bounds_are_of_all_models_together() -> None:
    holding = Holding(Bounds(requests_max=4))
    queues = [FairQueue(holding=holding), FairQueue(holding=holding)]
    taken = [queues[n % 2].offer(waits(f"t{n}")) for n in range(5)]
    assert taken == [None] * 4 + [Full.QUEUE]
    assert queues[0].next() is not None
    assert queues[1].offer(waits("late")) is None


def waits(tenant: str) -> Ticket:
    return Ticket(
        request=f"r{next(NUMBERS)}",
        tenant=tenant,
        priority_class="interactive",
        weight=1,
        cost_tokens=1,
        output_tokens=1,
        prompt_bytes=1,
        arrived_s=0.0,
        give_up_s=30.0,
    )
