"""Who is alive: heartbeats in key-value buckets, heard by everyone. Rule: absence counts only
after two lifetimes of our own connected time.

An entry is put each second and expires in the bucket when that stops. Listeners read the bucket
once, and again after each reconnect; between, they hear the puts themselves, which are ordinary
messages on the bucket's subjects. So a listener keeps no consumer on the broker, and a broker that
was away does not make it forget anybody.
"""

import asyncio
import base64
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from headrace import journal, topology
from headrace.bus import API_TIMEOUT_S, BrokerAway, BrokerRefused, Bus, Message
from schemas import subjects
from schemas.model import ModelCard

log = logging.getLogger(__name__)

Entry = TypeVar("Entry", bound=msgspec.Struct)

KEEP_ALIVE_S: Final = topology.MODEL_TTL_S / 3


class Roster(Generic[Entry]):
    """The entries heard of and when: pure, with time as an argument."""

    def __init__(self, ttl_s: float) -> None:
        self._patience_s = 2 * ttl_s
        self._heard: dict[str, tuple[Entry, float]] = {}

    def heard(self, name: str, entry: Entry, *, now_s: float) -> bool:
        """Note an entry; return whether it is new or says something else than before."""
        before = self._heard.get(name)
        self._heard[name] = (entry, now_s)
        return before is None or before[0] != entry

    def heard_s(self, name: str) -> float:
        """When an entry was last heard; long ago if never."""
        found = self._heard.get(name)
        return -math.inf if found is None else found[1]

    def gone(self, name: str) -> bool:
        """Note that an entry was deleted; return whether it was there."""
        return self._heard.pop(name, None) is not None

    def reconnected(self, *, now_s: float) -> None:
        """Give everyone a fresh lifetime: what they said meanwhile could not be heard."""
        self._heard = {name: (entry, now_s) for name, (entry, _) in self._heard.items()}

    def prune(self, *, now_s: float) -> list[str]:
        """Forget and return those who were silent for two lifetimes."""
        silent = [
            name for name, (_, at_s) in self._heard.items() if now_s - at_s > self._patience_s
        ]
        for name in silent:
            del self._heard[name]
        return silent

    def entries(self) -> dict[str, Entry]:
        """Return who is alive, by name."""
        return {name: entry for name, (entry, _) in self._heard.items()}


class Registry(Generic[Entry]):
    """A bucket's live entries. `start` it, and call `tick` each second while connected."""

    def __init__(
        self,
        bus: Bus,
        bucket: str,
        kind: type[Entry],
        *,
        ttl_s: float,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
        on_heard: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._decode = msgspec.json.Decoder(kind).decode
        self._roster: Roster[Entry] = Roster(ttl_s)
        self._clock = clock
        self._on_change = on_change
        self._on_heard = on_heard
        self._away = False

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Who is alive, by name."""
        return self._roster.entries()

    def heard_s(self, name: str) -> float:
        """When an entry was last heard, by the registry's clock; long ago if never."""
        return self._roster.heard_s(name)

    async def start(self) -> None:
        """Listen, then read what is there. Raises BrokerAway and BrokerRefused."""
        await self._bus.subscribe(f"$KV.{self._bucket}.>", self._message)
        self._bus.on_reconnect(self._read)
        await self._read()

    def tick(self) -> None:
        """Forget the silent, unless we were away and have not looked since."""
        self._away |= not self._bus.connected
        if not self._away and self._roster.prune(now_s=self._clock()):
            self._on_change()

    async def _read(self) -> None:
        self._roster.reconnected(now_s=self._clock())
        self._away = False
        prefix = f"$KV.{self._bucket}."
        for stored in await journal.read(self._bus, f"KV_{self._bucket}", f"{prefix}>"):
            if not stored.deleted:
                self._take(stored.subject, stored.data)

    async def _message(self, message: Message) -> None:
        headers = message.headers or {}
        if "KV-Operation" in headers:
            name = subjects.unescape(message.subject.rpartition(".")[2])
            if self._roster.gone(name):
                self._on_change()
        elif "Nats-Marker-Reason" not in headers:
            self._take(message.subject, message.data)

    def _take(self, subject: str, data: bytes) -> None:
        try:
            name = subjects.unescape(subject.rpartition(".")[2])
            entry = self._decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("an entry in %s that we cannot read: %s", self._bucket, error)
            return
        if self._roster.heard(name, entry, now_s=self._clock()):
            self._on_change()
        self._on_heard(name)


async def announce(bus: Bus, bucket: str, name: str, entry: msgspec.Struct) -> None:
    """Put a heartbeat. Raises BrokerAway."""
    await bus.publish(_key(bucket, name), msgspec.json.encode(entry))


async def withdraw(bus: Bus, bucket: str, name: str) -> None:
    """Delete an entry, so that nobody waits for it to expire. Raises as `Bus.store`."""
    await bus.store(_key(bucket, name), b"", headers={"KV-Operation": "DEL"})


async def publish_card(bus: Bus, card: ModelCard, files: Mapping[str, bytes]) -> ModelCard:
    """Store a model's tokenizer files under their digests, then its card, which names them.

    Returns the card as published. Raises BrokerAway and BrokerRefused.
    """
    names = {}
    for name, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        if not await _is_there(bus, digest):
            await bus.put_blob(subjects.BLOBS, digest, content)
        names[name] = digest
    card = msgspec.structs.replace(card, files=names)
    await topology.apply_model(bus, card.name, partitions=card.partitions)
    await bus.store(_key(subjects.MODELS, card.name), msgspec.json.encode(card))
    return card


async def _put_back(bus: Bus, card: ModelCard, files: Mapping[str, bytes]) -> None:
    """Store those of a card's files that are gone. Raises BrokerAway and BrokerRefused."""
    for name, blob in card.files.items():
        if name in files and not await _is_there(bus, blob):
            log.warning("%s of %s was gone from %s: put back", name, card.name, subjects.BLOBS)
            await bus.put_blob(subjects.BLOBS, blob, files[name])


async def _is_there(bus: Bus, blob: str) -> bool:
    """Tell whether a file's entry is in the object store (NATS ADR-20). Raises BrokerAway."""
    token = base64.urlsafe_b64encode(blob.encode()).decode()
    stream = f"OBJ_{subjects.BLOBS}"
    subject = f"$JS.API.DIRECT.GET.{stream}.$O.{subjects.BLOBS}.M.{token}"
    entry = await bus.request(subject, b"", timeout_s=API_TIMEOUT_S)
    return bool(entry) and not msgspec.json.decode(entry).get("deleted", False)


async def load_files(bus: Bus, card: ModelCard) -> dict[str, bytes]:
    """Return a card's tokenizer files. Raises BrokerAway, and BrokerRefused if one is missing."""
    files = {}
    for name, blob in card.files.items():
        content = await bus.get_blob(subjects.BLOBS, blob)
        if content is None:
            raise BrokerRefused(f"{name} of {card.name} is not in blobs", code=0, status=404)
        files[name] = content
    return files


async def read_card(bus: Bus, model: str) -> ModelCard | None:
    """Return a model's card, None if there is none. Raises BrokerAway and BrokerRefused."""
    entries = await journal.read(bus, f"KV_{subjects.MODELS}", _key(subjects.MODELS, model))
    alive = [entry for entry in entries if not entry.deleted]
    return msgspec.json.decode(alive[-1].data, type=ModelCard) if alive else None


async def keep_alive(bus: Bus, card: ModelCard, files: Mapping[str, bytes] | None = None) -> None:
    """Put a model's card again every `KEEP_ALIVE_S`, for ever: it expires when that stops.

    Where its `files` are given, those that are gone from the broker are put back.
    """
    while True:
        await asyncio.sleep(KEEP_ALIVE_S)
        try:
            await announce(bus, subjects.MODELS, card.name, card)
            await _put_back(bus, card, files or {})
        except (BrokerAway, BrokerRefused) as error:
            log.debug("the card of %s was not put: %s", card.name, error)


def _key(bucket: str, name: str) -> str:
    return f"$KV.{bucket}.{subjects.escape(name)}"
