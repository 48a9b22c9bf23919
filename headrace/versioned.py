"""Single entries of a key-value bucket, changed only where nobody else has changed them meanwhile.

The broker compares: a write names the revision that its writer has read, 0 for no entry.
"""

import base64
from typing import Final, NamedTuple

from headrace.bus import BrokerRefused, Bus

_NO_MESSAGE: Final = 10037
_WRONG_LAST_SEQUENCE: Final = 10071
_DELETED: Final = "KV-Operation"


class Changed(Exception):
    """Somebody else has written the entry since it was read."""


class Versioned(NamedTuple):
    """An entry; `data` is None where there is none, whose revision may yet be above 0."""

    revision: int
    data: bytes | None


async def read(bus: Bus, bucket: str, key: str) -> Versioned:
    """Return an entry as the bucket's leader has it. Raises BrokerAway and BrokerRefused."""
    subject = f"$KV.{bucket}.{key}"
    try:
        answer = await bus.api(f"STREAM.MSG.GET.KV_{bucket}", {"last_by_subj": subject})
    except BrokerRefused as error:
        if error.code == _NO_MESSAGE:
            return Versioned(0, None)
        raise
    message = answer["message"]
    if "hdrs" in message and _DELETED in base64.b64decode(message["hdrs"]).decode():
        return Versioned(message["seq"], None)
    return Versioned(message["seq"], base64.b64decode(message.get("data", "")))


async def write(bus: Bus, bucket: str, key: str, data: bytes, *, revision: int) -> int:
    """Write an entry and return its new revision. Raises Changed, BrokerAway and BrokerRefused.

    After BrokerAway it may have been written all the same.
    """
    return await _store(bus, bucket, key, data, {}, revision=revision)


async def delete(bus: Bus, bucket: str, key: str, *, revision: int) -> int:
    """Delete an entry; as `write`."""
    return await _store(bus, bucket, key, b"", {_DELETED: "DEL"}, revision=revision)


async def _store(
    bus: Bus, bucket: str, key: str, data: bytes, headers: dict[str, str], *, revision: int
) -> int:
    headers = {**headers, "Nats-Expected-Last-Subject-Sequence": str(revision)}
    try:
        return (await bus.store(f"$KV.{bucket}.{key}", data, headers=headers)).seq
    except BrokerRefused as error:
        if error.code == _WRONG_LAST_SEQUENCE:
            raise Changed from None
        raise
