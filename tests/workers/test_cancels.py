"""What is no longer wanted is remembered for half a minute, and then forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from workers.cancels import TOMBSTONE_S, Tombstones


def test_a_cancel_before_its_request_is_remembered() -> None:
    tombstones = Tombstones()
    assert not tombstones.has("a", now_s=100)
    tombstones.add("a", now_s=100)
    assert tombstones.has("a", now_s=100)
    assert tombstones.has("a", now_s=100 + TOMBSTONE_S - 0.1)
    assert not tombstones.has("b", now_s=100)


def test_a_tombstone_ends_after_its_time_pruned_or_not() -> None:
    tombstones = Tombstones()
    tombstones.add("a", now_s=100)
    assert not tombstones.has("a", now_s=100 + TOMBSTONE_S)
    tombstones.prune(now_s=100 + TOMBSTONE_S)
    assert not tombstones.has("a", now_s=100)


def test_a_second_cancel_prolongs_it() -> None:
    tombstones = Tombstones()
    tombstones.add("a", now_s=100)
    tombstones.add("b", now_s=101)
    tombstones.add("a", now_s=120)
    tombstones.prune(now_s=101 + TOMBSTONE_S)
    assert tombstones.has("a", now_s=149)
    assert not tombstones.has("b", now_s=101)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 20)), max_size=30))
def test_pruning_keeps_exactly_those_whose_time_runs(steps: list[tuple[str, float]]) -> None:
    tombstones, until_s, now_s = Tombstones(), {}, 0.0
    for request, later_s in steps:
        now_s += later_s
        tombstones.add(request, now_s=now_s)
        until_s[request] = now_s + TOMBSTONE_S
        tombstones.prune(now_s=now_s)
        for name in "abcdef":
            assert tombstones.has(name, now_s=now_s) == (until_s.get(name, 0.0) > now_s)
