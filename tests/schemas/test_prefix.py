"""Where a prompt belongs: equal prefixes meet, and nothing else decides."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.prefix import partition_of, prefix_key

KEY: dict[str, Any] = {
    "model": "m",
    "adapter": None,
    "tenant": "t",
    "session": None,
    "tokens": [1, 2, 3],
}


def test_the_key_is_sha_256_over_the_parts_with_their_lengths() -> None:
    raw = b"".join(
        [
            b"\0\0\0\2\1m",
            b"\0\0\0\0",
            b"\0\0\0\2\1t",
            b"\0\0\0\0",
            b"\1\0\0\0\2\0\0\0\3\0\0\0",
        ]
    )
    assert prefix_key(**KEY) == hashlib.sha256(raw).digest()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"adapter": "a"},
        {"adapter": ""},
        {"tenant": "u"},
        {"tenant": None},
        {"session": "s"},
        {"session": ""},
        {"tokens": [1, 2]},
        {"model": "mt", "tenant": ""},
    ],
)
def test_each_part_moves_the_key(change: dict[str, Any]) -> None:
    assert prefix_key(**KEY | change) != prefix_key(**KEY)


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**31), min_size=128, max_size=140), st.lists(st.integers(0, 9)))
def test_only_the_first_128_tokens_count(tokens: list[int], more: list[int]) -> None:
    assert prefix_key(**KEY | {"tokens": tokens[:128] + more}) == prefix_key(
        **KEY | {"tokens": tokens}
    )


def test_the_128th_token_counts() -> None:
    tokens = list(range(128))
    other = [*tokens[:127], 999]
    assert prefix_key(**KEY | {"tokens": tokens}) != prefix_key(**KEY | {"tokens": other})


def test_a_session_keys_the_prompt_whatever_its_tokens() -> None:
    one = prefix_key(**KEY | {"session": "s"})
    assert one == prefix_key(**KEY | {"session": "s", "tokens": [9]})
    assert one != prefix_key(**KEY | {"session": "s", "tenant": "u"})


@given(st.binary(min_size=32, max_size=32), st.integers(1, 64))
def test_a_partition_is_in_range(key: bytes, partitions: int) -> None:
    assert 0 <= partition_of(key, partitions=partitions) < partitions


def test_prompts_spread_evenly_over_32_partitions() -> None:
    counts = [0] * 32
    for number in range(3200):
        key = prefix_key(**KEY | {"tokens": [number]})
        counts[partition_of(key, partitions=32)] += 1
    assert min(counts) > 60
    assert max(counts) < 150
