"""How much a worker asks for: never more than its room, its own first, every place in turn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.credit import (
    BATCH_OWED_AFTER,
    FOREIGN_PAUSE_S,
    LOST_AFTER_S,
    OVERCOMMIT,
    OWED_PULL_S,
    OWN_CREDIT,
    PULL_S,
    ROTATING_PULL_S,
    Credits,
    Place,
    Pull,
)

PARTITIONS = 8


def worker_of(*, slots: int, owned: set[int] | None = None, partitions: int = 32) -> Credits:
    found = Credits(slots=slots, partitions=partitions)
    found.owned = frozenset(owned or ())
    return found


def asked(pulls: list[Pull]) -> int:
    return sum(pull.batch for pull in pulls)


class Room(RuleBasedStateMachine):
    """A worker's pulls under every order of deliveries, statuses, losses and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = 5
        self.credits = worker_of(slots=self.slots, owned={0, 3}, partitions=PARTITIONS)
        self.now_s = 100.0
        self.held = 0
        self.online_since = 0
        self.pulls: dict[str, tuple[Place, int, float]] = {}  # what the broker has

    @rule(later_s=st.floats(0, 0.4))
    def plan(self, later_s: float) -> None:
        self.now_s += later_s
        self.pulls = {t: pull for t, pull in self.pulls.items() if pull[2] > self.now_s}
        for pull in self.credits.plan(held=self.held, now_s=self.now_s):
            assert pull.batch >= 1
            own = pull.place.partition in self.credits.owned
            assert (pull.priority == 0) == own
            assert 0 <= pull.priority <= 9
            free = self.held < self.slots / 2
            assert pull.place.lane == "online" or free or self.online_since >= BATCH_OWED_AFTER
            self.pulls[pull.token] = (pull.place, pull.batch, self.now_s + pull.expires_s)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        place = self.pulls[data.draw(st.sampled_from(sorted(self.pulls)))][0]
        # The broker serves a place's oldest pull first.
        token = next(t for t, (at, _, _) in self.pulls.items() if at == place)
        _, left, until_s = self.pulls.pop(token)
        if left > 1:
            self.pulls = {token: (place, left - 1, until_s)} | self.pulls
        before = self.credits.outstanding
        self.credits.delivered(place, now_s=self.now_s)
        assert self.credits.outstanding == before - 1
        self.held += 1
        self.online_since = 0 if place.lane == "batch" else self.online_since + 1

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.pulls)))
        place, left, _ = self.pulls.pop(token)
        before = self.credits.outstanding
        assert self.credits.ended(token) == place
        assert self.credits.outstanding == before - left

    @precondition(lambda self: self.held)
    @rule()
    def finish(self) -> None:
        self.held -= 1

    @rule()
    def reconnect(self) -> None:
        self.credits.reset()
        self.pulls.clear()
        assert self.credits.outstanding == 0

    @rule()
    def lose(self) -> None:
        """The broker forgets every pull and says nothing; time passes."""
        self.pulls.clear()
        self.now_s += PULL_S + LOST_AFTER_S + 0.01

    @rule(owned=st.sets(st.integers(0, PARTITIONS - 1)))
    def rebalance(self, owned: set[int]) -> None:
        self.credits.owned = frozenset(owned)

    @invariant()
    def room_is_kept(self) -> None:
        handed_over_at_most = sum(left for _, left, _ in self.pulls.values())
        assert self.credits.outstanding >= handed_over_at_most
        assert self.credits.outstanding + self.held <= self.slots + OVERCOMMIT


TestRoom = Room.TestCase
TestRoom.settings = settings(max_examples=60, stateful_step_count=30)


@given(st.integers(1, 300), st.integers(0, 400), st.sets(st.integers(0, 31)))
def test_pulls_and_held_requests_never_pass_slots_and_overcommit(
    slots: int, held: int, owned: set[int]
) -> None:
    plan = worker_of(slots=slots, owned=owned).plan(held=held, now_s=1)
    assert asked(plan) <= max(0, slots + OVERCOMMIT - held)
    assert len({pull.token for pull in plan}) == len(plan)


def test_own_partitions_come_first_at_priority_0() -> None:
    plan = worker_of(slots=1024, owned={5, 9}).plan(held=0, now_s=1)
    online = [pull for pull in plan if pull.place.lane == "online"]
    assert {pull.place.partition for pull in online[:2]} == {5, 9}
    assert [(pull.batch, pull.priority) for pull in online[:2]] == [(OWN_CREDIT, 0)] * 2
    assert {(pull.batch, pull.priority) for pull in online[2:]} == {(1, 1)}
    assert {pull.place.partition for pull in online} == set(range(32))


def test_a_busier_worker_asks_for_foreign_partitions_less_urgently() -> None:
    priorities = []
    for held in (0, 256, 512, 768, 1000):
        plan = worker_of(slots=1024, owned={0}).plan(held=held, now_s=1)
        priorities.append(next(pull.priority for pull in plan if pull.place.partition != 0))
    assert priorities == sorted(priorities)
    assert priorities[0] == 1
    assert priorities[-1] in (8, 9)


def test_a_full_worker_asks_for_nothing() -> None:
    assert worker_of(slots=4, owned={1}).plan(held=4 + OVERCOMMIT, now_s=1) == []
    assert worker_of(slots=4, owned={1}).plan(held=100, now_s=1) == []


def test_batch_waits_until_half_the_slots_are_free() -> None:
    free = worker_of(slots=1024).plan(held=511, now_s=1)
    busy = worker_of(slots=1024).plan(held=512, now_s=1)
    assert {pull.place.lane for pull in free} == {"online", "batch"}
    assert {pull.place.lane for pull in busy} == {"online"}


def test_every_place_is_asked_before_any_is_asked_for_several() -> None:
    for slots in (64, 100, 128, 256, 1024):
        plan = worker_of(slots=slots, owned=set(range(32))).plan(held=0, now_s=1)
        assert len({pull.place for pull in plan}) == 64, slots


def test_batch_is_asked_last_while_there_is_little_room_for_it_and_every_place_in_turn() -> None:
    worker = worker_of(slots=40, owned=set(range(32)))
    reached: set[Place] = set()
    for turn in range(64):
        plan = worker.plan(held=0, now_s=1.0 + turn)
        lanes = [pull.place.lane for pull in plan]
        assert lanes == sorted(lanes, reverse=True)  # online, then batch
        assert lanes.count("online") == 32
        reached |= {pull.place for pull in plan}
        for pull in plan:
            worker.ended(pull.token)
    assert len(reached) == 64


def online_served(worker: Credits, count: int) -> None:
    for _ in range(count):
        worker.delivered(Place("online", 0), now_s=1)


def test_busy_slots_owe_batch_one_of_so_many_and_ask_one_place_at_a_time_for_it() -> None:
    worker = worker_of(slots=64, owned={0})
    online_served(worker, BATCH_OWED_AFTER - 1)
    assert {pull.place.lane for pull in worker.plan(held=32, now_s=2)} == {"online"}
    worker.reset()
    online_served(worker, 1)
    asked_there: set[Place] = set()
    for turn in range(200):
        [pull] = [p for p in worker.plan(held=32, now_s=3.0 + turn) if p.place.lane == "batch"]
        assert pull.batch == 1
        assert [p for p in worker.plan(held=32, now_s=3.0 + turn) if p.place.lane == "batch"] == []
        asked_there.add(pull.place)
        worker.reset()
    assert len(asked_there) == 32
    worker.delivered(Place("batch", 3), now_s=300)
    assert {pull.place.lane for pull in worker.plan(held=32, now_s=301)} == {"online"}


def test_a_small_worker_asks_for_the_batch_it_owes_only_where_it_waits() -> None:
    worker = worker_of(slots=4, owned={0})
    online_served(worker, BATCH_OWED_AFTER)
    worker.waiting = frozenset({Place("online", 3)})
    assert {pull.place.lane for pull in worker.plan(held=2, now_s=2)} == {"online"}
    worker.reset()
    worker.waiting = frozenset({Place("batch", 7), Place("online", 3)})
    plan = worker.plan(held=2, now_s=3)
    assert [p.place for p in plan if p.place.lane == "batch"] == [Place("batch", 7)]


@pytest.mark.parametrize("owned", [set(), {0}, {0, 16}, set(range(0, 32, 2)), set(range(32))])
@pytest.mark.parametrize(("slots", "held"), [(64, 60), (16, 0), (16, 16)])
def test_owed_or_idle_every_place_of_batch_is_asked_in_turn_and_soon(
    slots: int, held: int, owned: set[int]
) -> None:
    worker = worker_of(slots=slots, owned=owned)
    online_served(worker, BATCH_OWED_AFTER)
    reached: list[int] = []
    for turn in range(32):
        plan = worker.plan(held=held, now_s=2.0 + turn)
        [pull] = [pull for pull in plan if pull.place.lane == "batch"]
        assert pull.expires_s == (OWED_PULL_S if held else ROTATING_PULL_S)
        assert worker.plan(held=held, now_s=2.0 + turn) == []
        reached.append(pull.place.partition)
        for each in plan:
            worker.ended(each.token)
    assert sorted(reached) == [*range(32)]


def test_batch_is_not_asked_for_where_others_are_said_to_wait() -> None:
    worker = worker_of(slots=4, owned={0})
    worker.waiting = frozenset({Place("batch", 7), Place("online", 3)})
    assert {pull.place.lane for pull in worker.plan(held=0, now_s=2)} == {"online"}
    worker.reset()
    worker.waiting = frozenset({Place("batch", 7)})
    assert Place("batch", 7) in {pull.place for pull in worker.plan(held=0, now_s=3)}


def test_with_less_room_than_partitions_pulls_are_short_and_reach_every_place_in_turn() -> None:
    worker = worker_of(slots=1, owned={3})
    reached: set[int] = set()
    now_s = 1.0
    for _ in range(60):
        plan = worker.plan(held=1, now_s=now_s)
        assert asked(plan) <= OVERCOMMIT
        assert all(pull.batch == 1 and pull.expires_s < PULL_S for pull in plan)
        reached |= {pull.place.partition for pull in plan}
        for pull in plan:
            assert worker.ended(pull.token) == pull.place
        now_s += 0.1
    assert reached == set(range(32))


def test_own_partitions_are_never_left_out_of_the_rotation() -> None:
    worker = worker_of(slots=1, owned={3, 30})
    for turn in range(40):
        plan = worker.plan(held=1, now_s=float(turn))
        assert {3, 30} <= {pull.place.partition for pull in plan}
        for pull in plan:
            worker.ended(pull.token)


def test_a_lost_pull_is_forgotten_after_its_time_and_asked_again() -> None:
    worker = worker_of(slots=1024, owned={0})
    first = asked(worker.plan(held=0, now_s=10))
    assert worker.outstanding == first
    assert worker.plan(held=0, now_s=10.1) == []
    assert worker.plan(held=0, now_s=10 + PULL_S) == []
    assert asked(worker.plan(held=0, now_s=10 + PULL_S + LOST_AFTER_S + 0.01)) == first
    assert worker.outstanding == first


def test_a_status_ends_a_pull_once() -> None:
    worker = worker_of(slots=1024, owned={0})
    pull = worker.plan(held=0, now_s=1)[0]
    before = worker.outstanding
    assert worker.ended(pull.token) == pull.place
    assert worker.outstanding == before - pull.batch
    assert worker.ended(pull.token) is None
    assert worker.ended("unheard") is None
    assert worker.outstanding == before - pull.batch


def test_own_credit_is_topped_up_in_halves() -> None:
    worker = worker_of(slots=1024, owned={0})
    worker.plan(held=0, now_s=1)
    place = Place("online", 0)
    for delivered in range(1, OWN_CREDIT // 2):
        worker.delivered(place, now_s=1)
        assert worker.plan(held=delivered, now_s=1) == []
    worker.delivered(place, now_s=1)
    [pull] = worker.plan(held=4, now_s=1)
    assert (pull.place, pull.batch) == (place, OWN_CREDIT // 2)


def test_a_foreign_place_rests_a_few_ms_after_it_was_served() -> None:
    worker = worker_of(slots=1024, owned={0})
    worker.plan(held=0, now_s=1)
    foreign = Place("online", 7)
    worker.delivered(foreign, now_s=1)
    assert worker.plan(held=1, now_s=1 + FOREIGN_PAUSE_S / 2) == []
    [pull] = worker.plan(held=1, now_s=1 + FOREIGN_PAUSE_S * 1.01)
    assert pull.place == foreign


def test_a_delivery_that_was_not_asked_for_changes_nothing() -> None:
    worker = worker_of(slots=4)
    worker.delivered(Place("online", 1), now_s=1)
    assert worker.outstanding == 0


def test_with_little_room_half_of_it_is_kept_for_where_requests_wait() -> None:
    asking = worker_of(slots=2, owned=set(range(32)))
    blind = asking.plan(held=0, now_s=100.0)
    assert asked(blind) == 3
    free = sorted({Place("online", each) for each in range(32)} - {pull.place for pull in blind})
    asking.waiting = frozenset(free[-2:])
    assert {pull.place for pull in asking.plan(held=0, now_s=100.0)} == asking.waiting
    assert asking.outstanding == 5


def test_of_two_places_where_requests_wait_each_has_its_turn() -> None:
    asking = worker_of(slots=1, owned=set(range(32)))
    asking.waiting = frozenset({Place("online", 5), Place("online", 6)})
    served = []
    for now_s in range(100, 140):
        # Room for one: what it brings takes the slot, which is then free again.
        [pull] = asking.plan(held=OVERCOMMIT, now_s=float(now_s))
        asking.delivered(pull.place, now_s=float(now_s))
        served.append(pull.place.partition)
    assert served == [5, 6] * 20


def test_room_is_scarce_while_there_is_some_and_less_than_partitions() -> None:
    assert worker_of(slots=2).scarce(held=0)
    assert not worker_of(slots=2).scarce(held=6)
    assert not worker_of(slots=256).scarce(held=0)
    assert worker_of(slots=256).scarce(held=240)
