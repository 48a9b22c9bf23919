from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sim.kv import KvCache, root_name
from workers.sim.schedule import Row, Scheduler


def scheduler(
    *, blocks: int = 64, slots: int = 8, step_tokens: int = 32, caching: bool = True
) -> Scheduler[Row]:
    return Scheduler(
        KvCache(blocks), slots=slots, step_tokens=step_tokens, block_size=4, caching=caching
    )


def row(number: int, tokens: int, *, first: int = 0, priority: int = 0, paced: bool = False) -> Row:
    ids = array("I", range(first, first + tokens))
    return Row(rank=(priority, number), ids=ids, root=root_name(None), paced=paced)


def run(rows: Scheduler[Row]) -> dict[int, int]:
    """Do one step; each row that is complete says one token. Return the planned tokens."""
    planned = {}
    for each in rows.step():
        planned[each.rank[1]] = each.planned
        if rows.complete(each):
            each.ids.append(7)
    return planned


def test_a_long_prompt_is_computed_in_chunks_beside_those_that_decode() -> None:
    rows = scheduler()
    rows.add(row(1, 3))
    assert run(rows) == {1: 3}
    rows.add(row(2, 70, first=100))
    assert run(rows) == {1: 1, 2: 31}
    assert run(rows) == {1: 1, 2: 31}
    assert run(rows) == {1: 1, 2: 8}
    assert run(rows) == {1: 1, 2: 1}


def test_a_row_waits_while_all_slots_are_taken() -> None:
    rows = scheduler(slots=1)
    first, second = row(1, 3), row(2, 3, first=50)
    rows.add(first)
    rows.add(second)
    assert run(rows) == {1: 3}
    rows.remove(first)
    assert run(rows) == {2: 3}


def test_a_smaller_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    rows = scheduler(slots=2)
    for each in (row(1, 2, priority=1), row(2, 2, first=20), row(3, 2, first=40)):
        rows.add(each)
    assert list(run(rows)) == [2, 3]


def test_a_known_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    rows = scheduler()
    first, second = row(1, 8), row(2, 8)
    rows.add(first)
    run(rows)
    rows.remove(first)
    rows.add(second)
    assert run(rows) == {2: 4}
    assert second.cached == 4


def test_said_tokens_are_found_by_a_prompt_that_repeats_them() -> None:
    rows = scheduler()
    first = row(1, 6)
    rows.add(first)
    for _ in range(4):
        run(rows)
    rows.remove(first)
    second = Row(rank=(0, 2), ids=array("I", first.ids), root=root_name(None))
    rows.add(second)
    run(rows)
    assert second.cached == 8


def test_the_last_come_gives_its_blocks_to_those_before_it_and_comes_back() -> None:
    rows = scheduler(blocks=4, caching=False)
    first, second = row(1, 7), row(2, 7, first=50)
    rows.add(first)
    rows.add(second)
    while not rows.preemptions:
        run(rows)
    assert rows.waiting == [second]
    assert second.blocks == []
    rows.remove(first)
    assert run(rows) == {2: len(second.ids) - 1}


def test_a_paced_row_is_computed_at_once_and_is_in_no_step() -> None:
    rows = scheduler(step_tokens=4)
    paced = row(1, 20, paced=True)
    rows.add(paced)
    rows.admit_paced()
    assert rows.entered == [paced]
    assert paced.computed == 20
    assert rows.step() == []
    paced.ids.append(7)
    assert rows.extend(paced)
    assert len(paced.blocks) == 6


def test_a_parked_row_keeps_its_slot_and_blocks() -> None:
    rows = scheduler(slots=1)
    first = row(1, 5)
    rows.add(first)
    run(rows)
    rows.park(first)
    rows.add(row(2, 2, first=60))
    assert rows.step() == []
    assert rows.kv.free == 62


PLAN = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "pace", "step", "step", "tick", "remove", "park"]),
        st.integers(0, 30),
    ),
    max_size=80,
)


@settings(max_examples=200)
@given(PLAN, st.booleans())
def test_rows_own_what_they_compute_and_leave_nothing_behind(
    plan: list[tuple[str, int]], caching: bool
) -> None:
    rows = scheduler(blocks=12, slots=4, step_tokens=10, caching=caching)
    known: list[Row] = []
    for number, (action, size) in enumerate(plan):
        if action in ("add", "pace"):
            known.append(row(number, 1 + size % 24, first=size % 3, paced=action == "pace"))
            rows.add(known[-1])
        elif action == "step":
            assert sum(run(rows).values()) <= 10
            rows.entered.clear()
        elif action == "tick":
            rows.admit_paced()
            for each in known:
                if each.paced and each in rows.running and rows.extend(each):
                    each.ids.append(size)
        elif known and action == "remove":
            rows.remove(known.pop(size % len(known)))
        elif known and action == "park":
            rows.park(known[size % len(known)])
        for each in [each for each in known if len(each.ids) > 40]:
            known.remove(each)
            rows.remove(each)
        check(rows, known)
    for each in known:
        rows.remove(each)
    assert rows.kv.free == 12
    assert not rows.running
    assert not rows.waiting


def check(rows: Scheduler[Row], known: list[Row]) -> None:
    assert len(rows.running) <= 4
    assert {*rows.running, *rows.waiting} == {*known}
    for each in known:
        assert each.computed <= each.capacity == 4 * len(each.blocks)
        assert each.computed <= len(each.ids)
        assert bool(each.blocks) == (each in rows.running)
    for block in range(rows.kv.size):
        holders = sum(each.blocks.count(block) for each in known)
        assert rows.kv.owners(block) == holders
