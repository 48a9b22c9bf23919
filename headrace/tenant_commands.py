"""`headrace tenants` and `headrace keys`: who may come in, and what each may do.

What these write, every ingress hears at once. A key is shown once, when it is made; afterwards
nobody has more of it than its SHA-256.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar, cast

import msgspec
import typer

from headrace import settings, tenants
from headrace.bus import Bus
from headrace.command_line import CommandLine
from headrace.dismiss import dismiss_key
from headrace.inquire import withdraw_waiting
from headrace.operate import OperatorSettings, columns, counted, operate, refuse, warn
from headrace.tenant_terms import NAME_RULE, SetSettings, TenantName, changed, said
from headrace.tenants import Directory, Name, Record
from schemas.tenant import Entry, Key, Policy, Tenant, Tier, policy_of
from schemas.waiting import Selection

T = TypeVar("T", Tenant, Key)

KEY_BYTES: Final = 32
SPREAD_S: Final = 1.0
"""After so long no ingress admits a revoked key's requests any more."""

tenant_app = CommandLine(help="Tenants and what each may do.")
key_app = CommandLine(help="API keys.")

Entries = Mapping[Name, Record]


@dataclass(frozen=True, kw_only=True)
class ListSettings(OperatorSettings):
    """What the lists take."""


@dataclass(frozen=True, kw_only=True)
class DeleteSettings(OperatorSettings):
    """What `headrace tenants delete` takes."""

    tenant: TenantName


@dataclass(frozen=True, kw_only=True)
class CreateKeySettings(OperatorSettings):
    """What `headrace keys create` takes."""

    tenant: Annotated[str, typer.Option("--tenant", help="Whose key it is.")]


@dataclass(frozen=True, kw_only=True)
class ListKeysSettings(OperatorSettings):
    """What `headrace keys list` takes."""

    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose keys; else all.")] = None


@dataclass(frozen=True, kw_only=True)
class RevokeSettings(OperatorSettings):
    """What `headrace keys revoke` takes."""

    key: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `keys list` shows.")]
    end: Annotated[
        bool | None,
        typer.Option("--end/--finish", help="End its requests, or not; else as its tenant says."),
    ] = None


def list_tenants(wanted: ListSettings) -> None:
    """List tenants with what each may do, tier and defaults applied."""
    entries = operate(_entries(wanted))
    rows = []
    for tenant in _alive(entries, Tenant):
        policy = _policy(entries, tenant)
        rows.append({"name": tenant.name, "tier": tenant.tier, **msgspec.structs.asdict(policy)})
    if wanted.as_json:
        _print_json({"tenants": rows})
        return
    lines = columns([("TENANT", "TERMS"), *((row["name"], said(row)) for row in rows)])
    print("\n".join(lines))


def set_tenant(wanted: SetSettings) -> None:
    """Make a tenant, or change the terms that are named. The others stay."""
    tenant = operate(_set(wanted))
    if wanted.as_json:
        _print_json(msgspec.structs.asdict(tenant))
    else:
        print(f"{tenant.name} set")


async def _set(wanted: SetSettings) -> Tenant:
    async with wanted.connected() as bus:
        entries = await tenants.read_bucket(bus)

        def change(there: Record | None) -> Entry[Tenant]:
            tenant = changed(wanted, there)
            if tenant.tier is not None and ("tier", tenant.tier) not in entries:
                refuse(f"there is no tier {tenant.tier!r}: [[tiers]] in headrace.toml make them")
            return Entry(value=tenant, seed=None if there is None else there.seed)

        written = await tenants.amend(bus, "tenant", wanted.tenant, change)
    _warn_of_the_gate(entries)
    return cast(Tenant, written.value)


def delete_tenant(wanted: DeleteSettings) -> None:
    """Delete a tenant and revoke its keys. Its requests end or finish as it says."""
    revoked = operate(_delete(wanted))
    if wanted.as_json:
        _print_json({"name": wanted.tenant, "keys_revoked": revoked})
    else:
        print(f"{wanted.tenant} deleted, {counted(revoked, 'key')} revoked")


async def _delete(wanted: DeleteSettings) -> int:
    async with wanted.connected() as bus:
        entries = await tenants.read_bucket(bus)
        there = entries.get(("tenant", wanted.tenant))
        keys = [key for key in _alive(entries, Key) if key.tenant == wanted.tenant]
        if not keys and (there is None or there.gone_s is not None):
            refuse(f"there is no tenant {wanted.tenant!r}")
        gone_s = time.time()
        entry = there or Entry(value=Tenant(name=wanted.tenant))
        end = _policy(entries, entry.value).on_revoke == "end"
        # First the tenant: from then on none of its keys opens anything.
        await tenants.put(
            bus, "tenant", wanted.tenant, msgspec.structs.replace(entry, gone_s=gone_s)
        )
        for key in keys:
            revoked = msgspec.structs.replace(entries["key", key.id], gone_s=gone_s)
            await tenants.put(bus, "key", key.id, revoked)
        if end:
            await _end(bus, wanted.tenant, None)
    return len(keys)


def create_key(wanted: CreateKeySettings) -> None:
    """Make a key and print it, this once. The last line is the key alone."""
    secret = f"hr-{secrets.token_urlsafe(KEY_BYTES)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    key = Key(tenant=wanted.tenant, sha256=digest, created_s=time.time())
    operate(_create(wanted, key))
    if wanted.as_json:
        _print_json({"id": key.id, "tenant": key.tenant, "key": secret})
        return
    print(f"{key.id} for tenant {key.tenant}; this is the only time that the key is shown:")
    print(secret)


async def _create(wanted: CreateKeySettings, key: Key) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(key), Key)
    except msgspec.ValidationError:
        refuse(f"--tenant: {NAME_RULE}", status=2)
    async with wanted.connected() as bus:
        entries = await tenants.read_bucket(bus)
        there = entries.get(("tenant", key.tenant))
        if there is not None and there.gone_s is not None:
            refuse(f"tenant {key.tenant!r} was deleted: `headrace tenants set` makes it anew")
        await tenants.put(bus, "key", key.id, Entry(value=key))
    _warn_of_the_gate(entries)
    if there is None:
        warn(f"tenant {key.tenant!r} has no terms of its own yet, so nothing limits it")


def _warn_of_the_gate(entries: Entries) -> None:
    """Say so where what was just written is the first that closes the gate."""
    known = Directory()
    for (kind, name), record in entries.items():
        known.take(kind, name, record)
    if not known.guarded:
        warn("this is the first tenant or key: from now on every client must say who it is")


def list_keys(wanted: ListKeysSettings) -> None:
    """List the keys that open the gate: id, tenant, when it was made."""
    entries = operate(_entries(wanted))
    keys = [key for key in _alive(entries, Key) if wanted.tenant in (None, key.tenant)]
    if wanted.as_json:
        rows = [{"id": key.id, "tenant": key.tenant, "created_s": key.created_s} for key in keys]
        _print_json({"keys": rows})
        return
    lines = [(key.id, key.tenant, _made(key)) for key in keys]
    print("\n".join(columns([("ID", "TENANT", "MADE"), *lines])))


def _made(key: Key) -> str:
    if not key.created_s:
        return "configured"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(key.created_s))


def revoke_key(wanted: RevokeSettings) -> None:
    """Revoke a key: within a second it opens nothing any more."""
    ended = operate(_revoke(wanted))
    if wanted.as_json:
        _print_json({"id": wanted.key, "requests_ended": ended})
    else:
        print(f"{wanted.key} revoked" + (f", {counted(ended, 'request')} ended" if ended else ""))


async def _revoke(wanted: RevokeSettings) -> int:
    async with wanted.connected() as bus:
        entries = await tenants.read_bucket(bus)
        there = entries.get(("key", wanted.key))
        if there is None or there.gone_s is not None or not isinstance(there.value, Key):
            refuse(f"there is no key {wanted.key!r}")
        await tenants.put(
            bus, "key", wanted.key, msgspec.structs.replace(there, gone_s=time.time())
        )
        tenant = there.value.tenant
        end = wanted.end
        if end is None:
            owner = entries.get(("tenant", tenant))
            end = _policy(entries, None if owner is None else owner.value).on_revoke == "end"
        return await _end(bus, tenant, wanted.key) if end else 0


async def _end(bus: Bus, tenant: str, key: str | None) -> int:
    """End a tenant's requests, or those of one of its keys; return how many."""
    ended = await _end_now(bus, tenant, key)
    # What an ingress admitted before the news reached it.
    await asyncio.sleep(SPREAD_S)
    return ended + await _end_now(bus, tenant, key)


async def _end_now(bus: Bus, tenant: str, key: str | None) -> int:
    """End those that wait in ingress first: what leaves the queue makes room for them."""
    answers = await withdraw_waiting(bus, Selection(tenant=tenant, key=key))
    withdrawn = sum(answer.withdrawn for answer in answers)
    return withdrawn + await dismiss_key(bus, tenant=tenant, key=key)


def _alive(entries: Entries, kind: type[T]) -> list[T]:
    """Return what is neither deleted nor revoked, in the order of its names."""
    return [
        record.value
        for _, record in sorted(entries.items())
        if record.gone_s is None and isinstance(record.value, kind)
    ]


def _policy(entries: Entries, tenant: object) -> Policy:
    terms = tenant if isinstance(tenant, Tenant) else None
    tier = entries.get(("tier", terms.tier)) if terms is not None and terms.tier else None
    found = tier.value if tier is not None and isinstance(tier.value, Tier) else None
    return policy_of(terms, found)


async def _entries(wanted: OperatorSettings) -> dict[Name, Record]:
    async with wanted.connected() as bus:
        return await tenants.read_bucket(bus)


def _print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


tenant_app.command("list")(settings.taking(ListSettings, list_tenants))
tenant_app.command("set")(settings.taking(SetSettings, set_tenant))
tenant_app.command("delete")(settings.taking(DeleteSettings, delete_tenant))
key_app.command("create")(settings.taking(CreateKeySettings, create_key))
key_app.command("list")(settings.taking(ListKeysSettings, list_keys))
key_app.command("revoke")(settings.taking(RevokeSettings, revoke_key))
