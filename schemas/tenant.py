"""Tenants, tiers and what they may do: frozen values. Rule: a limit that nobody named is none.

A tenant's own words go before its tier's. Figures per minute are averages; `burst` counts requests.
"""

from typing import Any, Final, Literal

import msgspec

PriorityClass = Literal["interactive", "standard", "batch"]
OnRevoke = Literal["finish", "end"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may do, tier and defaults applied; None stands for no limit.

    `burst` is in requests (without it: one minute's worth), `concurrent_requests` counts all open
    ones, waiting ones too; `models` are the allowed names; `deadline_s` is the default of requests
    that name none. A tenant of weight 2 is served twice as often as one of weight 1 while both
    wait. `share_prefixes` lets its prompts share KV blocks with other tenants that allow it;
    `on_revoke` says what becomes of the running requests of a key that is revoked.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    burst: int | None = None
    concurrent_requests: int | None = None
    queued_requests: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    models: tuple[str, ...] | None = None
    weight: int = 1
    priority_class: PriorityClass = "standard"
    deadline_s: float | None = None
    share_prefixes: bool = False
    on_revoke: OnRevoke = "finish"


UNLIMITED: Final = Policy()


class Terms(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A policy as it is written down; None says nothing about a field."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    burst: int | None = None
    concurrent_requests: int | None = None
    queued_requests: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    models: tuple[str, ...] | None = None
    weight: int | None = None
    priority_class: PriorityClass | None = None
    deadline_s: float | None = None
    share_prefixes: bool | None = None
    on_revoke: OnRevoke | None = None


class Tier(Terms, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A policy that tenants share by its name."""


class Tenant(Terms, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tenant: its name, its tier, and where it differs from it."""

    tier: str | None = None


def policy_of(tenant: Tenant | None, tier: Tier | None) -> Policy:
    """Return what a tenant may do: its own terms, else its tier's, else the defaults."""
    said: dict[str, Any] = {}
    for terms in (tier, tenant):
        if terms is not None:
            said |= {
                field: value
                for field in Policy.__struct_fields__
                if (value := getattr(terms, field)) is not None
            }
    return Policy(**said) if said else UNLIMITED
