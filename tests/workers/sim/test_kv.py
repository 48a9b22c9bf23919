from array import array

from hypothesis import given
from hypothesis import strategies as st

from workers.sim.kv import KvCache, block_name, root_name

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "find", "name", "release"]), st.integers(0, 9)), max_size=60
)


@given(ACTIONS)
def test_blocks_never_leak_and_are_owned_by_those_who_hold_them(
    actions: list[tuple[str, int]],
) -> None:
    kv = KvCache(8)
    held: list[list[int]] = []
    for action, number in actions:
        if action == "take":
            taken = kv.take(number)
            assert (taken is None) == (number > 8 - len({b for blocks in held for b in blocks}))
            for block in taken or ():
                assert not any(block in blocks for blocks in held)
            held.append(taken or [])
        elif action == "find":
            found = kv.find([bytes([number]), bytes([number + 1])])
            kv.hold(found)
            held.append(found)
        elif action == "name" and held and held[-1]:
            kv.name(held[-1][number % len(held[-1])], bytes([number]))
        elif action == "release" and held:
            kv.release(held.pop(number % len(held)))
        for block in range(8):
            assert kv.owners(block) == sum(blocks.count(block) for blocks in held)
        assert kv.free == 8 - len({b for blocks in held for b in blocks})
    for blocks in held:
        kv.release(blocks)
    assert kv.free == 8
    assert kv.used == 0.0
    assert sorted(kv.take(8) or ()) == list(range(8))


def test_a_released_block_is_found_until_it_is_taken_for_something_else() -> None:
    kv = KvCache(2)
    first = kv.take(1) or []
    kv.name(first[0], b"a")
    kv.release(first)
    assert kv.find([b"a", b"b"]) == first
    kv.take(2)
    assert kv.find([b"a"]) == []


def test_the_least_recently_used_block_goes_first() -> None:
    kv = KvCache(3)
    blocks = kv.take(3) or []
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        kv.name(block, name)
    kv.release(blocks[:1])
    kv.release(blocks[1:])
    again = kv.find([b"a"])
    kv.hold(again)
    kv.release(again)
    # Of b and c, released together, the later in the sequence goes first.
    assert [kv.take(1) for _ in range(3)] == [[blocks[2]], [blocks[1]], [blocks[0]]]


def test_a_block_without_content_goes_before_one_with() -> None:
    kv = KvCache(2)
    blocks = kv.take(2) or []
    kv.name(blocks[0], b"a")
    kv.release(blocks)
    assert kv.take(1) == blocks[1:]


def test_a_name_stands_for_all_that_went_before_and_for_the_salt() -> None:
    tokens = array("I", range(16))
    names = {block_name(root_name(salt), tokens) for salt in (None, "", "a", "b")}
    assert len(names) == 4
    chained = block_name(block_name(root_name(None), tokens), tokens)
    assert chained not in names
