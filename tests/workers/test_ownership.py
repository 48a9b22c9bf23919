"""Which partitions a worker owns: everyone agrees, and a change moves only its share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.ownership import owned

NAMES = st.sets(st.text(min_size=1, max_size=12).filter(str.isascii), min_size=1, max_size=12)


def owners(workers: set[str] | list[str], *, partitions: int = 32) -> dict[int, str]:
    found: dict[int, str] = {}
    for worker in workers:
        for partition in owned(worker, workers, partitions=partitions):
            assert partition not in found, "owned twice"
            found[partition] = worker
    return found


@given(NAMES)
def test_every_partition_is_owned_exactly_once(workers: set[str]) -> None:
    assert set(owners(workers)) == set(range(32))


@given(NAMES)
def test_the_order_in_which_workers_are_known_does_not_matter(workers: set[str]) -> None:
    for worker in workers:
        assert owned(worker, sorted(workers), partitions=32) == owned(
            worker, sorted(workers, reverse=True), partitions=32
        )


@given(NAMES, st.text(min_size=1, max_size=12))
def test_a_join_moves_partitions_to_the_newcomer_only(workers: set[str], newcomer: str) -> None:
    before, after = owners(workers), owners(workers | {newcomer})
    assert {after[p] for p in before if after[p] != before[p]} <= {newcomer}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_a_join_moves_about_its_share(count: int) -> None:
    workers = [f"worker-{number}" for number in range(count)]
    before = owners(workers, partitions=4096)
    after = owners([*workers, "newcomer"], partitions=4096)
    moved = sum(before[p] != after[p] for p in before)
    share = 4096 / (count + 1)
    assert 0.7 * share < moved < 1.3 * share


def test_partitions_spread_evenly() -> None:
    workers = [f"worker-{number}" for number in range(8)]
    counts = [len(owned(worker, workers, partitions=4096)) for worker in workers]
    assert sum(counts) == 4096
    assert min(counts) > 0.8 * 512
    assert max(counts) < 1.2 * 512


def test_a_worker_that_knows_nobody_owns_everything() -> None:
    assert owned("a", [], partitions=32) == frozenset(range(32))
    assert owned("a", ["a"], partitions=32) == frozenset(range(32))
