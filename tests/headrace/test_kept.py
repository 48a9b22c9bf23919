"""Kept answers: whole or not at all, a tenant's own, of any length."""

import pytest

from headrace import journal
from headrace.bus import Bus
from headrace.kept import PART_BYTES_MAX, keep, kept
from schemas.subjects import answer_key
from tests.broker import with_bus

BUCKET = "KV_responses"


def test_frames_come_back_as_they_were_and_to_their_tenant_alone(url: str) -> None:
    async def test(bus: Bus) -> None:
        frames = (b"a", b"", b"\x00\xff")
        await keep(bus, tenant="t/1", request="req_1", frames=frames)
        assert await kept(bus, tenant="t/1", request="req_1") == frames
        assert await kept(bus, tenant="t", request="req_1") is None
        assert await kept(bus, tenant="t/1", request="req_2") is None

    with_bus(url, test)


@pytest.mark.parametrize("sizes", [[PART_BYTES_MAX - 40], [PART_BYTES_MAX], [400_000] * 9])
def test_a_long_answer_is_kept_in_messages_of_bounded_size(url: str, sizes: list[int]) -> None:
    async def test(bus: Bus) -> None:
        frames = tuple(bytes([number]) * size for number, size in enumerate(sizes))
        await keep(bus, tenant="t", request="req_1", frames=frames)
        assert await kept(bus, tenant="t", request="req_1") == frames
        stored = await journal.read(bus, BUCKET, "$KV.responses.>")
        assert all(len(entry.data) < PART_BYTES_MAX + 100 for entry in stored)
        assert (len(stored) > 1) == (sum(sizes) + 5 * len(sizes) + 3 > PART_BYTES_MAX)

    with_bus(url, test)


def test_keeping_again_changes_nothing(url: str) -> None:
    async def test(bus: Bus) -> None:
        frames = (b"a" * 1_500_000, b"b")
        for _ in range(2):
            await keep(bus, tenant="t", request="req_1", frames=frames)
        assert await kept(bus, tenant="t", request="req_1") == frames
        assert len(await journal.read(bus, BUCKET, "$KV.responses.>")) == 3

    with_bus(url, test)


def test_an_answer_without_its_head_or_a_part_is_none(url: str) -> None:
    async def test(bus: Bus) -> None:
        key = answer_key(tenant="t", request="req_1")
        await keep(bus, tenant="t", request="req_1", frames=(b"a" * 1_500_000,))
        await bus.purge(BUCKET, f"{key}.1")
        assert await kept(bus, tenant="t", request="req_1") is None
        await bus.store(key, b"", headers={"KV-Operation": "DEL"})
        assert await kept(bus, tenant="t", request="req_1") is None
        await bus.store(key, b"something else")
        assert await kept(bus, tenant="t", request="req_1") is None

    with_bus(url, test)
