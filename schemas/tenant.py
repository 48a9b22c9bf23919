"""Tenants, tiers and what they may do: frozen values. Rule: a limit that nobody named is none.

There may be 100,000 of them, so they are out of the garbage collector's sight (`gc=False`): they
hold strings and numbers, and no cycle.

A tenant's own words go before its tier's. Figures per minute are averages; `burst` counts requests.
"""

import hashlib
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec

from schemas.subjects import Lane

PriorityClass = Literal["interactive", "standard", "batch"]
OnRevoke = Literal["finish", "end"]

DEADLINE_S_MAX: Final = 840
WEIGHT_MAX: Final = 1000
_SHOWN: Final = r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+\Z"
"""Names stand in lists on terminals: nothing that commands one, or turns a line's direction."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=_SHOWN)]
"""What a tenant, tier or model may be called: no control characters."""
_Some = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Any = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Weight = Annotated[int, msgspec.Meta(ge=1, le=WEIGHT_MAX)]
_Deadline = Annotated[float, msgspec.Meta(gt=0, le=DEADLINE_S_MAX)]


def lane_of(priority_class: PriorityClass) -> Lane:
    """Return the lane of the queue that a class's requests wait in."""
    return "batch" if priority_class == "batch" else "online"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may do, tier and defaults applied; None stands for no limit.

    `burst` is in requests (without it: one minute's worth), `concurrent_requests` counts all open
    ones, waiting ones too; `models` are the allowed names; `deadline_s` is the default of requests
    that name none. A tenant of weight 2 is served twice as often as one of weight 1 while both
    wait. `share_prefixes` lets its prompts share KV blocks with other tenants that allow it;
    `on_revoke` says what becomes of the running requests of a key that is revoked; `moderation`
    False spares its requests and answers the moderator.
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
    moderation: bool = True

    def allows(self, model: str) -> bool:
        """Tell whether a model may be asked for."""
        return self.models is None or model in self.models


UNLIMITED: Final = Policy()


class Terms(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """A policy as it is written down; None says nothing about a field."""

    name: Name
    requests_per_minute: _Some | None = None
    tokens_per_minute: _Some | None = None
    burst: _Some | None = None
    concurrent_requests: _Some | None = None
    queued_requests: _Any | None = None
    max_input_tokens: _Some | None = None
    max_output_tokens: _Some | None = None
    models: tuple[Name, ...] | None = None
    weight: _Weight | None = None
    priority_class: PriorityClass | None = None
    deadline_s: _Deadline | None = None
    share_prefixes: bool | None = None
    on_revoke: OnRevoke | None = None
    moderation: bool | None = None


class Tier(Terms, frozen=True, kw_only=True):
    """A policy that tenants share by its name."""


class Tenant(Terms, frozen=True, kw_only=True):
    """A tenant: its name, its tier, and where it differs from it."""

    tier: Name | None = None


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


class Key(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A key that clients may show: the tenant it speaks for and the SHA-256 of it, hexadecimal."""

    tenant: Name
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    created_s: float = 0.0

    @property
    def id(self) -> str:
        """What the key is called by, which says nothing of the key itself."""
        return key_id(bytes.fromhex(self.sha256))


def key_id(digest: bytes) -> str:
    """Return the id of the key with this SHA-256."""
    return "key_" + hashlib.sha256(digest).hexdigest()[:16]


Value = TypeVar("Value")


class Entry(
    msgspec.Struct, Generic[Value], frozen=True, kw_only=True, omit_defaults=True, gc=False
):
    """What the bucket `tenants` holds of a tenant, a tier or a key.

    `seed` is the digest of the configuration's words where those made the entry. `gone_s` (seconds
    since the epoch) says that it was deleted or revoked, so that no configuration brings it back.
    """

    value: Value
    seed: str | None = None
    gone_s: float | None = None
