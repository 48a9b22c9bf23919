"""Who is known: the bucket before the configuration, changes at once, revocations for good."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from headrace import tenants, topology
from headrace.bus import Bus
from headrace.tenant_settings import ApiKey, Tenancy, key_of
from headrace.tenants import (
    Change,
    Directory,
    Followed,
    Name,
    Record,
    amend,
    put,
    read_bucket,
    seed,
    seeding,
    write,
)
from schemas.tenant import UNLIMITED, Entry, Key, Policy, Tenant, Tier, key_id, policy_of
from tests.broker import with_bus
from tests.servers import NatsServer
from tests.waiting import until

ACME = Tenant(name="acme", tier="gold", weight=5)
GOLD = Tier(name="gold", weight=3, requests_per_minute=60)


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def key(tenant: str, secret: str) -> Key:
    return Key(tenant=tenant, sha256=digest(secret).hex())


def test_a_tenants_own_terms_go_before_its_tiers_and_those_before_the_defaults() -> None:
    assert policy_of(ACME, GOLD) == Policy(weight=5, requests_per_minute=60)
    assert policy_of(Tenant(name="a"), None) is UNLIMITED
    assert policy_of(None, GOLD).weight == 3


def test_a_policy_follows_its_tenant_and_its_tier() -> None:
    known = Directory()
    assert known.policy("acme") == UNLIMITED
    known.take("tenant", "acme", Entry(value=ACME))
    assert known.policy("acme") == Policy(weight=5)
    known.take("tier", "gold", Entry(value=GOLD))
    assert known.policy("acme") == Policy(weight=5, requests_per_minute=60)
    known.take("tenant", "acme", Entry(value=Tenant(name="acme", tier="gold")))
    assert known.policy("acme") == Policy(weight=3, requests_per_minute=60)


def test_tenants_of_equal_terms_share_one_policy() -> None:
    known = Directory(tenancy=Tenancy({n: Tenant(name=n, burst=1) for n in "ab"}))
    assert known.policy("a") is known.policy("b")


def test_nothing_at_all_is_unguarded_and_anything_guards() -> None:
    assert not Directory().guarded
    assert Directory([key_of("a", "k")]).guarded
    assert Directory(tenancy=Tenancy({"acme": ACME})).guarded
    known = Directory()
    known.take("tier", "gold", Entry(value=GOLD))
    assert not known.guarded
    known.take("tenant", "acme", Entry(value=ACME))
    assert known.guarded


def test_revoking_the_last_key_or_deleting_the_last_tenant_does_not_open_the_gate() -> None:
    for kind, name, value in (("key", "k", key("a", "k")), ("tenant", "acme", ACME)):
        known = Directory()
        known.take(kind, name, Entry(value=value))  # type: ignore[arg-type]
        known.take(kind, name, Entry(value=value, gone_s=1.0))  # type: ignore[arg-type]
        assert known.guarded


def test_a_key_names_its_tenant_until_it_is_revoked() -> None:
    known = Directory([key_of("own", "o")])
    known.take("key", "x", Entry(value=key("acme", "k")))
    found = known.find(digest("k"))
    assert found is not None
    assert (found.tenant, found.key) == ("acme", key_id(digest("k")))
    assert known.find(digest("o")) is not None
    assert known.find(digest("other")) is None
    known.take("key", "x", Entry(value=key("acme", "k"), gone_s=1.0))
    assert known.find(digest("k")) is None
    assert known.is_gone("acme", found.key)
    assert not known.is_gone("acme", None)


def test_a_key_of_the_configuration_can_be_revoked_in_the_bucket() -> None:
    known = Directory([key_of("own", "o")])
    known.take("key", key_id(digest("o")), Entry(value=key("own", "o"), gone_s=1.0))
    assert known.find(digest("o")) is None


def test_a_deleted_tenants_keys_open_nothing() -> None:
    known = Directory([key_of("acme", "k")], Tenancy({"acme": ACME}))
    known.take("tenant", "acme", Entry(value=ACME, gone_s=1.0))
    assert known.find(digest("k")) is None
    assert known.is_gone("acme", None)
    known.take("tenant", "acme", Entry(value=ACME))
    assert known.find(digest("k")) is not None


def test_what_leaves_the_bucket_falls_back_to_the_configuration() -> None:
    own = Tenancy({"acme": ACME}, {"gold": GOLD})
    known = Directory([key_of("acme", "o")], own)
    known.take("tenant", "acme", Entry(value=Tenant(name="acme", weight=9)))
    known.take("key", key_id(digest("k")), Entry(value=key("acme", "k")))
    assert known.policy("acme") == Policy(weight=9)
    known.take("tenant", "acme", None)
    for secret in "ok":
        known.take("key", key_id(digest(secret)), None)
    assert known.policy("acme") == policy_of(ACME, GOLD)
    assert known.find(digest("o")) is not None
    assert known.find(digest("k")) is None


# Seeding


def seeded(
    stored: Mapping[Name, Record], keys: Iterable[ApiKey] = (), tenancy: Tenancy | None = None
) -> dict[Name, Record]:
    """Return the bucket after a start with this configuration."""
    after = dict(stored)
    for change in seeding(stored, keys, tenancy or Tenancy(), now_s=5.0):
        if change.after is None:
            del after[change.name]
        else:
            after[change.name] = change.after
    return after


OWN = Tenancy({"acme": ACME}, {"gold": GOLD})
KEYS = [key_of("acme", "k")]
KEY: Name = ("key", key_id(digest("k")))
TENANT: Name = ("tenant", "acme")


def test_the_configuration_is_written_once() -> None:
    first = seeded({}, KEYS, OWN)
    assert set(first) == {KEY, TENANT, ("tier", "gold")}
    assert seeding(first, KEYS, OWN, now_s=6.0) == []


def replaced(record: Record, **changes: Any) -> Record:
    fields = {"value": record.value, "seed": record.seed, "gone_s": record.gone_s}
    return Entry(**(fields | changes))


def test_an_operators_change_stays_until_the_configuration_says_something_new() -> None:
    bucket = seeded({}, KEYS, OWN)
    bucket[TENANT] = replaced(bucket[TENANT], value=Tenant(name="acme", weight=9))
    assert seeded(bucket, KEYS, OWN) == bucket
    newer = Tenancy({"acme": Tenant(name="acme", weight=2)})
    assert seeded(bucket, KEYS, newer)[TENANT].value == Tenant(name="acme", weight=2)


def test_a_revoked_key_never_comes_back() -> None:
    bucket = seeded({}, KEYS, OWN)
    bucket[KEY] = replaced(bucket[KEY], gone_s=1.0)
    assert seeded(bucket, KEYS, OWN)[KEY].gone_s == 1.0
    by_command: dict[Name, Record] = {KEY: Entry(value=key("acme", "k"), gone_s=1.0)}
    assert seeded(by_command, KEYS, OWN)[KEY].gone_s == 1.0


def test_a_deleted_tenant_stays_deleted_while_the_configuration_says_the_same() -> None:
    bucket = seeded({}, KEYS, OWN)
    bucket[TENANT] = replaced(bucket[TENANT], gone_s=1.0)
    assert seeded(bucket, KEYS, OWN)[TENANT].gone_s == 1.0


def test_what_left_the_configuration_leaves_the_bucket_and_may_come_again() -> None:
    bucket = seeded(seeded({}, KEYS, OWN))
    assert set(bucket) == {TENANT, KEY}
    assert {record.gone_s for record in bucket.values()} == {5.0}
    assert seeded(bucket) == bucket
    again = seeded(bucket, KEYS, OWN)
    assert again[TENANT].gone_s is None
    assert again == seeded({}, KEYS, OWN)


def test_a_configuration_taken_away_whole_leaves_no_guard() -> None:
    known = Directory()
    for (kind, name), record in seeded(seeded({}, KEYS, OWN)).items():
        known.take(kind, name, record)
    assert not known.guarded


def test_what_operators_made_is_not_touched() -> None:
    made: dict[Name, Record] = {
        TENANT: Entry(value=ACME),
        KEY: Entry(value=key("acme", "k")),
    }
    assert seeded(made) == made


# On a broker


@pytest.fixture
def tenants_url(own_nats: NatsServer) -> str:
    async def apply(bus: Bus) -> None:
        await topology.apply(bus)

    with_bus(own_nats.url, apply)
    return own_nats.url


def test_a_change_is_heard_by_every_follower(tenants_url: str) -> None:
    async def run(bus: Bus) -> None:
        known = [Directory(), Directory()]
        changes: list[int] = []
        for each in known:
            await Followed(bus, each, on_change=lambda: changes.append(1)).start()
        before = len(changes)
        await put(bus, "tenant", "a/b c", Entry(value=Tenant(name="a/b c", weight=7)))
        await put(bus, "key", "k", Entry(value=key("a/b c", "k")))
        await until(lambda: all(each.find(digest("k")) for each in known))
        assert {each.policy("a/b c").weight for each in known} == {7}
        await put(bus, "key", "k", Entry(value=key("a/b c", "k"), gone_s=1.0))
        await until(lambda: not any(each.find(digest("k")) for each in known))
        acme = (await read_bucket(bus))["tenant", "a/b c"]
        await write(bus, [Change(("tenant", "a/b c"), acme, None)])
        await until(lambda: not any(each.knows("a/b c") for each in known))
        assert len(changes) == before + 8

    with_bus(tenants_url, run)


def test_a_follower_that_starts_late_reads_what_is_there(tenants_url: str) -> None:
    count = 300

    async def run(bus: Bus) -> None:
        wanted = Tenancy({f"t{n}": Tenant(name=f"t{n}") for n in range(count)})
        assert await seed(bus, {}, KEYS, wanted) == count + 1
        await write(bus, [Change(("tenant", "t0"), (await read_bucket(bus))["tenant", "t0"], None)])
        await bus.store("$KV.tenants.tenant.broken", b"{")
        await bus.store("$KV.tenants.foreign", b"{}")
        known = Directory()
        stored = await Followed(bus, known).start()
        assert len(stored) == count
        assert known.knows("t299")
        assert not known.knows("t0")
        assert known.find(digest("k")) is not None
        # The same again would change one thing: t0 is not there.
        assert await seed(bus, stored, KEYS, wanted) == 1

    with_bus(tenants_url, run)


def test_what_was_revoked_while_the_configuration_is_written_stays_revoked(
    tenants_url: str,
) -> None:
    async def run(bus: Bus) -> None:
        await seed(bus, {}, KEYS, OWN)
        stored = await read_bucket(bus)
        left = seeding(stored, [], Tenancy(), now_s=5.0)
        revoked = replaced(stored[KEY], gone_s=1.0)
        await put(bus, *KEY, revoked)
        await put(bus, *TENANT, replaced(stored[TENANT], value=Tenant(name="acme", weight=9)))
        new = ("tenant", "new")
        await put(bus, *new, Entry(value=Tenant(name="new", weight=9)))
        own = Entry(value=Tenant(name="new"), seed="own")
        await write(bus, [*left, Change(new, None, own)])
        bucket = await read_bucket(bus)
        assert bucket[KEY] == revoked
        assert bucket[TENANT].value == Tenant(name="acme", weight=9)
        assert bucket[new].value == Tenant(name="new", weight=9)
        assert ("tier", "gold") not in bucket

    with_bus(tenants_url, run)


def test_of_changes_of_one_tenant_at_once_none_is_lost(tenants_url: str) -> None:
    async def run(bus: Bus) -> None:
        def adding(model: str) -> Callable[[Record | None], Record]:
            def change(there: Record | None) -> Record:
                before = there.value.models or () if isinstance(there, Entry) else ()
                return Entry(value=Tenant(name="acme", models=(*before, model)))

            return change

        names = [f"m{n}" for n in range(20)]
        await asyncio.gather(*[amend(bus, "tenant", "acme", adding(name)) for name in names])
        tenant = (await read_bucket(bus))[TENANT].value
        assert isinstance(tenant, Tenant)
        assert sorted(tenant.models or ()) == sorted(names)

    with_bus(tenants_url, run)


def test_an_empty_bucket_is_read(tenants_url: str) -> None:
    async def run(bus: Bus) -> None:
        assert await read_bucket(bus) == {}

    with_bus(tenants_url, run)


def test_what_was_not_heard_is_read_before_long(
    tenants_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "CHECK_S", 0.05)

    async def run(bus: Bus) -> None:
        known = Directory()
        followed = Followed(bus, known)
        await followed.start()
        followed._take = lambda message: None  # type: ignore[method-assign] # all is lost
        followed._seq -= 1
        await put(bus, "tenant", "acme", Entry(value=ACME))
        following = asyncio.create_task(followed.follow())
        await until(lambda: known.knows("acme"))
        following.cancel()

    with_bus(tenants_url, run)


def test_a_change_made_while_a_node_was_cut_off_is_known_after_it_is_back(
    own_nats: NatsServer, tenants_url: str
) -> None:
    async def run(bus: Bus) -> None:
        known = Directory()
        await Followed(bus, known).start()
        own_nats.stop()
        await until(lambda: not bus.connected)
        own_nats.start()
        # Another node's put, which may come before or after this one is back.
        await until(lambda: bus.connected)
        await put(bus, "key", "k", Entry(value=key("acme", "k")))
        await until(lambda: known.find(digest("k")))

    with_bus(tenants_url, run)
