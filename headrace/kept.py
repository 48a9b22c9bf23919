"""Answers that outlive REPLIES: the frames of an ended reply, for 24 hours, in `responses`.

Rule: the head is stored last, so an answer is there as a whole or not at all. An answer is one
msgpack array of frames, cut into parts where it is longer than a message should be; the head holds
the first part, how many follow, and the digest of the whole.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace import journal
from headrace.bus import Bus
from schemas import subjects

log = logging.getLogger(__name__)

PART_BYTES_MAX: Final = 512 * 1024
_HEADER_BYTES: Final = 512  # the head's own members, and the protocol's line
_STREAM: Final = f"KV_{subjects.RESPONSES}"


class _Head(msgspec.Struct, frozen=True, array_like=True):
    version: int
    more_parts: int
    digest: bytes
    first: bytes


_encode = msgspec.msgpack.Encoder().encode
_read_head = msgspec.msgpack.Decoder(_Head).decode
_read_frames = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


async def keep(bus: Bus, *, tenant: str, request: str, frames: Sequence[bytes]) -> None:
    """Keep the frames of an ended reply for 24 hours; the same again changes nothing.

    Raises BrokerAway and BrokerRefused.
    """
    whole = _encode(list(frames))
    size = min(PART_BYTES_MAX, bus.payload_bytes_max - _HEADER_BYTES)
    first, *more = [whole[start : start + size] for start in range(0, len(whole), size)]
    key = subjects.answer_key(tenant=tenant, request=request)
    for number, part in enumerate(more, 1):
        await bus.store(f"{key}.{number}", part)
    head = _Head(1, len(more), hashlib.sha256(whole).digest(), first)
    await bus.store(key, _encode(head))


async def kept(bus: Bus, *, tenant: str, request: str) -> tuple[bytes, ...] | None:
    """Return the frames that were kept of a tenant's request, None if there are none.

    Raises BrokerAway and BrokerRefused.
    """
    key = subjects.answer_key(tenant=tenant, request=request)
    found = await journal.read(bus, _STREAM, key)
    if not found or found[-1].deleted:
        return None
    try:
        head = _read_head(found[-1].data)
        parts = await asyncio.gather(
            *(_part(bus, f"{key}.{number + 1}") for number in range(head.more_parts))
        )
        whole = b"".join([head.first, *parts])
        if head.version == 1 and hashlib.sha256(whole).digest() == head.digest:
            return _read_frames(whole)
    except msgspec.MsgspecError as error:
        log.warning("%s: a kept answer that we cannot read: %s", request, error)
        return None
    log.warning("%s: a kept answer that is not whole", request)
    return None


async def _part(bus: Bus, key: str) -> bytes:
    """Return one part, empty where it is gone."""
    found = await journal.read(bus, _STREAM, key)
    return found[-1].data if found else b""
