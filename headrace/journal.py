"""Reading a stream back by subject, through batched direct gets (NATS ADR-31)."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from headrace.bus import BrokerRefused, Bus

_BATCH: Final = 1000


class Entry(NamedTuple):
    """A stored message: its sequence in the stream, its subject and its bytes."""

    seq: int
    subject: str
    data: bytes
    deleted: bool = False


async def read(bus: Bus, stream: str, subject: str, *, after_seq: int = 0) -> list[Entry]:
    """Return the messages under a subject (or filter) in order, those after a stream sequence.

    Of a key-value bucket, which keeps one message per key, these are its entries.
    Raises BrokerAway and BrokerRefused.
    """
    entries: list[Entry] = []
    while True:
        query = {"seq": after_seq + 1, "next_by_subj": subject, "batch": _BATCH}
        if not await _read_batch(bus, stream, query, entries):
            return entries
        after_seq = entries[-1].seq


async def _read_batch(
    bus: Bus, stream: str, query: dict[str, object], entries: list[Entry]
) -> bool:
    """Append one batch to `entries`; return whether there is more."""
    async for answer in bus.gather(f"$JS.API.DIRECT.GET.{stream}", query):
        headers = answer.headers or {}
        match headers.get("Status"):
            case None:
                entries.append(_entry(answer.data, headers))
            case "204":  # end of batch
                return headers.get("Nats-Num-Pending", "0") != "0"
            case "404":  # nothing under this subject
                return False
            case status:
                raise BrokerRefused(headers.get("Description", ""), code=0, status=int(status))
    return False


def _entry(data: bytes, headers: Mapping[str, str]) -> Entry:
    # A key-value delete or an expired entry's marker is a message too.
    deleted = "KV-Operation" in headers or "Nats-Marker-Reason" in headers
    return Entry(int(headers["Nats-Sequence"]), headers["Nats-Subject"], data, deleted)
