"""Tenants, tiers and keys: the bucket `tenants`, and how every ingress follows it.

Rule: the bucket's word goes before that of a node's own configuration, and what an operator revoked
or deleted stays so. Puts are heard as plain messages on the bucket's subjects, so that a change is
everywhere within a round trip and nobody keeps a consumer; the bucket is read at start, again after
a reconnect, and when its last sequence shows that a put was missed.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Literal, NamedTuple

import msgspec

from headrace import bulk, versioned
from headrace.bus import BrokerAway, BrokerRefused, Bus, Message
from headrace.tenant_settings import NO_TENANCY, ApiKey, Tenancy
from schemas import subjects
from schemas.tenant import UNLIMITED, Entry, Key, Policy, Tenant, Tier, key_id, policy_of

log = logging.getLogger(__name__)

Kind = Literal["tenant", "tier", "key"]
Name = tuple[Kind, str]
Record = Entry[Tenant] | Entry[Tier] | Entry[Key]

STREAM: Final = f"KV_{subjects.TENANTS}"
CHECK_S: Final = 5.0
UNSEEDED: Final = ""
"""The seed of a tenant or key that left the configuration: its words may come again."""
_CHUNK: Final = 500
_PREFIX: Final = f"$KV.{subjects.TENANTS}."
_DECODE: Final[dict[str, Callable[[bytes], Record]]] = {
    "tenant": msgspec.json.Decoder(Entry[Tenant]).decode,
    "tier": msgspec.json.Decoder(Entry[Tier]).decode,
    "key": msgspec.json.Decoder(Entry[Key]).decode,
}


class Change(NamedTuple):
    """An entry that is to be written; None where there is none before, or shall be none after."""

    name: Name
    before: Record | None
    after: Record | None


class Known(NamedTuple):
    """A key that opens the gate: whose it is, and what it is called by."""

    tenant: str
    key: str


class Directory:
    """Who is known, and what each may do. Pure; starts with a node's own configuration."""

    def __init__(self, keys: Iterable[ApiKey] = (), tenancy: Tenancy = NO_TENANCY) -> None:
        self._own_keys = {bytes.fromhex(key.sha256): key.tenant for key in keys}
        self._own = tenancy
        self._policies: dict[str, Policy] = {}
        self._same: dict[Policy, Policy] = {}
        self.clear()

    def clear(self) -> None:
        """Know nothing but what this node's own configuration says."""
        self._tenants = dict(self._own.tenants)
        self._tiers = dict(self._own.tiers)
        self._keys = dict(self._own_keys)
        self._deleted: set[str] = set()
        self._revoked: set[str] = set()
        self._ended_by_operator = False
        self._forget_policies()

    @property
    def guarded(self) -> bool:
        """Whether clients must say who they are: anything is configured, or was revoked.

        Revoking the last key must not open the gate to all.
        """
        return bool(
            self._own.guarded
            or self._own_keys
            or self._keys
            or self._tenants
            or self._ended_by_operator
        )

    @property
    def has_keys(self) -> bool:
        """Whether any key is known that was not revoked."""
        return bool(self._keys)

    def find(self, digest: bytes) -> Known | None:
        """Return whose key has this SHA-256, None for one that is unknown, revoked or deleted."""
        # Looking a digest up does not tell by its timing how much of a key was right.
        tenant = self._keys.get(digest)
        if tenant is None or tenant in self._deleted:
            return None
        return Known(tenant, key_id(digest))

    def is_gone(self, tenant: str, key: str | None) -> bool:
        """Tell whether a tenant was deleted, or the key it came with revoked."""
        return tenant in self._deleted or (key is not None and key in self._revoked)

    def knows(self, tenant: str) -> bool:
        """Tell whether somebody wrote the tenant down."""
        return tenant in self._tenants

    def policy(self, tenant: str) -> Policy:
        """Return what a tenant may do; one that nobody wrote down has no limits."""
        found = self._policies.get(tenant)
        if found is not None:
            return found
        terms = self._tenants.get(tenant)
        if terms is None:
            return UNLIMITED
        policy = policy_of(terms, self._tiers.get(terms.tier) if terms.tier else None)
        # Thousands of tenants of one tier share one value.
        policy = self._policies[tenant] = self._same.setdefault(policy, policy)
        return policy

    def take(self, kind: Kind, name: str, record: Record | None) -> None:
        """Learn an entry of the bucket; None for one that is no longer there."""
        if record is not None and record.gone_s is not None and record.seed != UNSEEDED:
            self._ended_by_operator = True
        match record:
            case None:
                self._drop(kind, name)
            case Entry(value=Key() as key):
                self._take_key(key, gone=record.gone_s is not None)
            case Entry(value=Tier() as tier):
                self._tiers[name] = tier
                self._forget_policies()
            case Entry(value=Tenant() as tenant):
                self._policies.pop(name, None)
                if record.gone_s is None:
                    self._tenants[name] = tenant
                    self._deleted.discard(name)
                else:
                    self._tenants.pop(name, None)
                    self._deleted.add(name)

    def _take_key(self, key: Key, *, gone: bool) -> None:
        digest = bytes.fromhex(key.sha256)
        if gone:
            self._keys.pop(digest, None)
            self._revoked.add(key_id(digest))
        else:
            self._keys[digest] = key.tenant
            if self._revoked:
                self._revoked.discard(key_id(digest))

    def _drop(self, kind: Kind, name: str) -> None:
        """Fall back to this node's own configuration."""
        self._forget_policies()
        if kind == "key":
            for digest in [each for each in self._keys if key_id(each) == name]:
                if digest not in self._own_keys:
                    del self._keys[digest]
            return
        own: Mapping[str, Any] = getattr(self._own, f"{kind}s")
        now: dict[str, Any] = self._tenants if kind == "tenant" else self._tiers
        self._deleted.discard(name if kind == "tenant" else "")
        now.pop(name, None)
        if name in own:
            now[name] = own[name]

    def _forget_policies(self) -> None:
        self._policies.clear()
        self._same.clear()


class Followed:
    """A directory that follows the bucket. `start` it; run `follow` as a task."""

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._on_change = on_change
        self._reading = asyncio.Lock()
        self._missed: list[Message] | None = None
        self._seq = 0

    async def start(self) -> Mapping[Name, Record]:
        """Listen, then read what is there and return it. Raises BrokerAway and BrokerRefused."""
        await self._bus.subscribe(f"{_PREFIX}>", self._heard)
        self._bus.on_reconnect(self._read_again)
        return await self._read()

    async def _read_again(self) -> None:
        await self._read()

    async def _read(self) -> Mapping[Name, Record]:
        async with self._reading:
            self._missed = []
            try:
                seq = await _last_seq(self._bus)
                stored = await read_bucket(self._bus)
                self._directory.clear()
                for (kind, name), record in stored.items():
                    self._directory.take(kind, name, record)
                for message in self._missed:
                    self._take(message)
                # What was heard since `seq` was asked for is counted by the heard themselves.
                self._seq = seq + len(self._missed)
            finally:
                self._missed = None
        self._on_change()
        return stored

    async def follow(self) -> None:
        """Read the bucket again whenever it holds what was not heard; for ever."""
        suspected = 0
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                seq = await _last_seq(self._bus)
                # One that is on its way to us is no reason; it is heard by the next time.
                if seq == self._seq or seq != suspected:
                    suspected = seq
                    continue
                await self._read()
            except (BrokerAway, BrokerRefused) as error:
                log.debug("the tenants were not looked at: %s", error)

    async def _heard(self, message: Message) -> None:
        if self._missed is not None:
            self._missed.append(message)
            return
        self._seq += 1
        self._take(message)
        self._on_change()

    def _take(self, message: Message) -> None:
        deleted = "KV-Operation" in (message.headers or {})
        found = _read(message.subject, b"" if deleted else message.data)
        if found is not None:
            (kind, name), record = found
            self._directory.take(kind, name, record)


async def read_bucket(bus: Bus) -> dict[Name, Record]:
    """Return all entries, gone ones too. Raises BrokerAway and BrokerRefused."""
    entries: dict[Name, Record] = {}
    async with aclosing(bulk.read(bus, STREAM, f"{_PREFIX}>")) as pages:
        async for page in pages:
            for message in page:
                found = _read(message.subject, message.data)
                if found is not None and found[1] is not None:
                    entries[found[0]] = found[1]
    return entries


async def seed(
    bus: Bus, stored: Mapping[Name, Record], keys: Iterable[ApiKey], tenancy: Tenancy
) -> int:
    """Write the configuration's tenants, tiers and keys into the bucket; return how many changed.

    `stored` is what the bucket holds.

    Its words go into the bucket when they are new, and leave it when they have left the
    configuration; what an operator changed since, revoked or deleted stays. Raises BrokerAway and
    BrokerRefused.
    """
    changes = seeding(stored, keys, tenancy, now_s=time.time())
    await write(bus, changes)
    return len(changes)


async def write(bus: Bus, changes: Sequence[Change]) -> None:
    """Make changes, but for those whose entry somebody else has changed meanwhile: theirs stays.

    Raises BrokerAway and BrokerRefused.
    """
    for start in range(0, len(changes), _CHUNK):
        await asyncio.gather(*[_make(bus, change) for change in changes[start : start + _CHUNK]])


async def _make(bus: Bus, change: Change) -> None:
    kind, name = change.name
    revision = 0 if change.before is None else None  # None: not known yet
    while True:
        if revision is None:
            revision, there = await _read_one(bus, kind, name)
            if there != change.before:
                return
        try:
            await _write(bus, kind, name, change.after, revision=revision)
            return
        except versioned.Changed:
            revision = None


def seeding(
    stored: Mapping[Name, Record],
    keys: Iterable[ApiKey],
    tenancy: Tenancy,
    *,
    now_s: float,
) -> list[Change]:
    """Return what must be written so that the bucket holds the configuration's words."""
    wanted: dict[Name, Tenant | Tier | Key] = {}
    for tier in tenancy.tiers.values():
        wanted["tier", tier.name] = tier
    for tenant in tenancy.tenants.values():
        wanted["tenant", tenant.name] = tenant
    for each in keys:
        key = Key(tenant=each.tenant, sha256=each.sha256)
        wanted["key", key.id] = key
    changes: list[Change] = []
    for name, value in wanted.items():
        there = stored.get(name)
        digest = hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
        if there is not None and (there.seed == digest or _is_revoked(there)):
            continue
        after: Any = Entry(value=value, seed=digest)
        changes.append(Change(name, there, after))
    for name, there in stored.items():
        if there.seed and there.gone_s is None and name not in wanted:
            left = msgspec.structs.replace(there, seed=UNSEEDED, gone_s=now_s)
            changes.append(Change(name, there, None if name[0] == "tier" else left))
    return changes


def _is_revoked(record: Record) -> bool:
    """Tell whether an operator ended a key: that is for good."""
    is_gone = record.gone_s is not None and record.seed != UNSEEDED
    return is_gone and isinstance(record.value, Key)


async def put(bus: Bus, kind: Kind, name: str, record: Record) -> None:
    """Write an entry, whatever it was. Raises BrokerAway and BrokerRefused."""
    await bus.store(f"{_PREFIX}{_key(kind, name)}", msgspec.json.encode(record))


async def amend(
    bus: Bus, kind: Kind, name: str, change: Callable[[Record | None], Record]
) -> Record:
    """Write and return what `change` makes of an entry, None for none.

    It is called again where somebody else has written the entry meanwhile. Raises BrokerAway and
    BrokerRefused.
    """
    while True:
        revision, there = await _read_one(bus, kind, name)
        record = change(there)
        try:
            await _write(bus, kind, name, record, revision=revision)
            return record
        except versioned.Changed:
            pass


async def _read_one(bus: Bus, kind: Kind, name: str) -> tuple[int, Record | None]:
    """Return an entry's revision and the entry; None also for one that we cannot read."""
    key = _key(kind, name)
    found = await versioned.read(bus, subjects.TENANTS, key)
    record = _read(f"{_PREFIX}{key}", found.data or b"")
    return found.revision, None if record is None else record[1]


async def _write(bus: Bus, kind: Kind, name: str, record: Record | None, *, revision: int) -> None:
    key = _key(kind, name)
    if record is None:
        await versioned.delete(bus, subjects.TENANTS, key, revision=revision)
    else:
        data = msgspec.json.encode(record)
        await versioned.write(bus, subjects.TENANTS, key, data, revision=revision)


def _key(kind: Kind, name: str) -> str:
    return f"{kind}.{subjects.escape(name)}"


def _read(subject: str, data: bytes) -> tuple[Name, Record | None] | None:
    """Read an entry by its subject; None for one that we cannot read."""
    kind, _, token = subject[len(_PREFIX) :].partition(".")
    decode = _DECODE.get(kind)
    if decode is None:
        return None
    try:
        return (kind, subjects.unescape(token)), decode(data) if data else None  # type: ignore[return-value]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        log.warning("an entry in %s that we cannot read: %s", subjects.TENANTS, error)
        return None


async def _last_seq(bus: Bus) -> int:
    return int((await bus.api(f"STREAM.INFO.{STREAM}"))["state"]["last_seq"])
