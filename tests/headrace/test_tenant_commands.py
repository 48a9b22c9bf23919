"""What operators write of tenants and keys, what they are told, and what they are warned of."""

import hashlib

import pytest

from headrace.bus import Bus
from headrace.tenant_terms import TERMS
from headrace.tenants import put
from schemas.tenant import Entry, Tenant, Tier
from tests.broker import with_bus
from tests.queue import asked, headrace

FIRST = "this is the first tenant or key"
NO_TERMS = "has no terms of its own yet"


def listed(url: str) -> list[str]:
    return headrace(url, "tenants", "list").stdout.splitlines()


def changed(url: str, *args: str) -> str:
    """Change a tenant; return what was warned of."""
    result = headrace(url, "tenants", "set", *args)
    assert result.exit_code == 0, result.output
    return result.stderr


def test_lists_without_entries_have_their_heads(url: str) -> None:
    assert listed(url) == ["TENANT TERMS"]
    assert headrace(url, "keys", "list").stdout == "ID TENANT MADE\n"


def test_a_tenant_is_listed_with_what_differs_from_the_defaults(url: str) -> None:
    changed(url, "plain")
    changed(url, "spared", "--no-moderation", "--share-prefixes", "--model", "a", "--model", "b")
    changed(url, "heavy", "--weight", "3", "--priority-class", "batch", "--on-revoke", "end")
    changed(url, "as-usual", "--moderation", "--own-prefixes", "--weight", "1")
    assert listed(url) == [
        "TENANT   TERMS",
        "as-usual",
        "heavy    weight=3 priority_class=batch on_revoke=end",
        "plain",
        "spared   models=a,b share_prefixes=true moderation=false",
    ]


def test_what_a_tenant_takes_back_from_its_tier_is_not_listed(url: str) -> None:
    with_bus(url, lambda bus: _gold(bus))
    changed(url, "acme", "--tier", "gold")
    assert listed(url)[1] == "acme   tier=gold weight=3 moderation=false"
    changed(url, "acme", "--moderation")
    assert listed(url)[1] == "acme   tier=gold weight=3"


async def _gold(bus: Bus) -> None:
    await put(bus, "tier", "gold", Entry(value=Tier(name="gold", weight=3, moderation=False)))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--priority-class", "x"), ("--priority-class", "'interactive', 'standard', 'batch'")),
        (("--on-revoke", "x"), ("--on-revoke", "'finish', 'end'")),
        (("--weight", "0"), ("--weight", "1")),
        (("--weight", "1001"), ("--weight", "1000")),
        (("--burst", "0"), ("--burst", "1")),
        (("--queued-requests", "-1"), ("--queued-requests", "0")),
        (("--tokens-per-minute", str(2**60)), ("--tokens-per-minute", str(2**53))),
        (("--deadline-s", "0"), ("--deadline-s", "above 0", "840")),
        (("--deadline-s", "nan"), ("--deadline-s", "840")),
        (("--tier", ""), ("--tier", "1 to 128 characters")),
        (("--model", "a\tb"), ("--model", "1 to 128 characters")),
        (("--clear", "model"), ("--clear model", *TERMS)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_term_that_cannot_be_is_told_with_its_flag_and_what_may_stand_there(
    url: str, args: tuple[str, ...], told: tuple[str, ...]
) -> None:
    result = headrace(url, "tenants", "set", "acme", *args)
    assert result.exit_code == 2
    for part in told:
        assert part in result.stderr
    for foreign in ("Value error", "`$", "Expected `str`"):
        assert foreign not in result.stderr
    assert listed(url) == ["TENANT TERMS"]


def test_a_term_is_cleared_by_its_name_or_its_flags(url: str) -> None:
    changed(url, "acme", "--max-output-tokens", "5", "--burst", "2")
    changed(url, "acme", "--clear", "max-output-tokens", "--clear", "burst")
    assert listed(url)[1] == "acme"


def test_a_tenants_name_that_cannot_be_is_told(url: str) -> None:
    result = headrace(url, "keys", "create", "--tenant", "")
    assert (result.exit_code, "--tenant: a name has" in result.stderr) == (2, True)
    result = headrace(url, "tenants", "set", "a\nb")
    assert (result.exit_code, "TENANT: a name has" in result.stderr) == (2, True)


def test_the_first_tenant_closes_the_gate_and_says_so_once(url: str) -> None:
    assert FIRST in changed(url, "acme")
    assert changed(url, "acme", "--weight", "2") == ""
    assert changed(url, "other") == ""
    headrace(url, "tenants", "delete", "acme")
    headrace(url, "tenants", "delete", "other")
    assert changed(url, "third") == ""  # deleting does not open it again


def test_the_first_key_closes_the_gate_and_a_tenant_without_terms_is_told(url: str) -> None:
    first = headrace(url, "keys", "create", "--tenant", "neverseen")
    assert first.exit_code == 0
    assert len(first.stderr.splitlines()) == 2
    assert FIRST in first.stderr
    assert f"'neverseen' {NO_TERMS}" in first.stderr
    second = headrace(url, "keys", "create", "--tenant", "neverseen")
    assert FIRST not in second.stderr
    assert NO_TERMS in second.stderr
    changed(url, "neverseen", "--weight", "2")
    assert headrace(url, "keys", "create", "--tenant", "neverseen").stderr == ""


def test_a_warning_is_no_part_of_what_is_printed(url: str) -> None:
    made = asked(url, "keys", "create", "--tenant", "t")
    assert set(made) == {"id", "tenant", "key"}
    assert hashlib.sha256(made["key"].encode()).hexdigest() not in str(asked(url, "keys", "list"))


def test_what_left_the_configuration_has_not_closed_the_gate(url: str) -> None:
    async def leave(bus: Bus) -> None:
        gone = Entry(value=Tenant(name="left"), seed="", gone_s=1.0)
        await put(bus, "tenant", "left", gone)

    with_bus(url, leave)
    assert FIRST in changed(url, "acme")


def test_one_key_is_revoked_and_two_are(url: str) -> None:
    for tenant, keys in (("one", 1), ("two", 2)):
        for _ in range(keys):
            headrace(url, "keys", "create", "--tenant", tenant)
    assert headrace(url, "tenants", "delete", "one").stdout == "one deleted, 1 key revoked\n"
    assert headrace(url, "tenants", "delete", "two").stdout == "two deleted, 2 keys revoked\n"
