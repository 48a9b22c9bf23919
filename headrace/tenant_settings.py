"""What headrace.toml says of tenants: `[[tenants]]`, `[[tiers]]`, `[[keys]]`, `[jwt]`, `[mtls]`.

Rule: what nothing knows is named and refused, here and not at the first request.
"""

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard, TypeVar
from urllib.parse import urlsplit

import msgspec

from headrace.sockets import is_loopback
from schemas.tenant import Name, Tenant, Terms, Tier

TABLES: Final = frozenset({"tenants", "tiers", "keys", "jwt", "mtls", "moderation", "logging"})
"""The tables of headrace.toml; everything else at its top level is an option."""

T = TypeVar("T", bound=Terms)
S = TypeVar("S", bound=msgspec.Struct)
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class JwtSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[jwt]`: whose tokens are believed. Exactly one of key, jwks_file and jwks_url is named.

    `key` is the secret of HS256, or a public key as PEM. `tenant_claim` may go deeper by dots
    where no claim of the whole name exists. `unknown_tenants` says what becomes of a token whose
    tenant nobody wrote down.
    """

    algorithms: tuple[Literal["HS256", "RS256", "ES256"], ...] = ()
    key: str | None = None
    jwks_file: str | None = None
    jwks_url: str | None = None
    audience: str | tuple[str, ...] | None = None
    issuer: str | None = None
    tenant_claim: str = "tenant"
    unknown_tenants: Literal["admit", "refuse"] = "admit"

    def __post_init__(self) -> None:
        named = [name for name in ("key", "jwks_file", "jwks_url") if getattr(self, name)]
        if len(named) != 1:
            raise ValueError("[jwt] needs one of key, jwks_file and jwks_url")
        if self.jwks_url is not None:
            url = urlsplit(self.jwks_url)
            plain = url.scheme == "http" and is_loopback(url.hostname or "")
            if url.scheme != "https" and not plain:
                raise ValueError("jwks_url must be https: who can change it can be any tenant")
            if "HS256" in self.algorithms:
                raise ValueError("a secret of HS256 cannot be published at a jwks_url")
        if self.key is not None and "HS256" in self.algorithms and len(self.algorithms) > 1:
            raise ValueError("a key is either a secret (HS256) or a public key (RS256, ES256)")
        if self.key is not None and "HS256" in self.used and self.is_pem:
            raise ValueError("a public key is no secret for HS256")

    @property
    def is_pem(self) -> bool:
        """Whether `key` is a public key."""
        return (self.key or "").lstrip().startswith("-----BEGIN")

    @property
    def used(self) -> tuple[str, ...]:
        """The algorithms that are believed: those named, else what the key's kind suggests."""
        if self.algorithms:
            return self.algorithms
        return ("HS256",) if self.key is not None and not self.is_pem else ("RS256", "ES256")


class MtlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[mtls]`: the header in which a proxy names a verified client certificate's subject.

    `proxies` are addresses or networks; from anywhere else the header has no effect. `subjects`
    maps whole subjects or common names to tenants; without it the common name is the tenant's.
    """

    header: str
    proxies: tuple[str, ...]
    subjects: Mapping[str, Name] | None = None

    def __post_init__(self) -> None:
        if not self.header or not self.proxies:
            raise ValueError("[mtls] needs a header and proxies")
        if self.header.lower() in ("authorization", "host", "origin", "cookie"):
            raise ValueError(f"[mtls] header cannot be {self.header!r}")
        _ = self.networks  # an address that is none is an error at start

    @property
    def networks(self) -> tuple[Network, ...]:
        """The proxies' networks. Raises ValueError."""
        return tuple(ipaddress.ip_network(proxy) for proxy in self.proxies)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients may show: the tenant it speaks for, and its SHA-256 in hexadecimal."""

    tenant: str
    sha256: str


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The keys that are configured. False where clients need none: the node serves loopback only.

    `guarded` says that tenants, `[jwt]` or `[mtls]` stand in the configuration.
    """

    keys: tuple[ApiKey, ...] = ()
    guarded: bool = False

    def __bool__(self) -> bool:
        return bool(self.keys) or self.guarded


NO_KEYS: Final = ApiKeys()


@dataclass(frozen=True, slots=True)
class Tenancy:
    """What the file says of tenants, beside its keys."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    jwt: JwtSettings | None = None
    mtls: MtlsSettings | None = None

    @property
    def guarded(self) -> bool:
        """Whether clients must say who they are, whatever keys there are."""
        return bool(self.tenants or self.jwt or self.mtls)


NO_TENANCY: Final = Tenancy()


def read_tenancy(document: Mapping[str, Any], folder: Path) -> Tenancy:
    """Read all tables but the keys; file names are relative to `folder`. Raises ValueError."""
    tiers = _named(document.get("tiers", []), "tiers", Tier)
    tenants = _named(document.get("tenants", []), "tenants", Tenant)
    for tenant in tenants.values():
        if tenant.tier is not None and tenant.tier not in tiers:
            raise ValueError(f"tenant {tenant.name!r}: there is no tier {tenant.tier!r}")
    jwt, mtls = document.get("jwt"), document.get("mtls")
    found = None if jwt is None else read_table(jwt, "[jwt]", JwtSettings)
    if found is not None and found.jwks_file is not None:
        found = msgspec.structs.replace(found, jwks_file=str(folder / found.jwks_file))
    return Tenancy(
        tenants, tiers, found, None if mtls is None else read_table(mtls, "[mtls]", MtlsSettings)
    )


def read_keys(raw: object) -> tuple[ApiKey, ...]:
    """Read `[[keys]]`. Raises ValueError."""
    found = []
    for table in _tables(raw, "keys"):
        for name in table.keys() - {"tenant", "sha256"}:
            raise ValueError(f"{name!r} in [[keys]] is no setting; tenant and sha256 are")
        tenant, digest = table.get("tenant"), table.get("sha256")
        if not _is_name(tenant):
            raise ValueError("each of [[keys]] needs a tenant")
        if not isinstance(digest, str) or not _is_sha256(digest):
            raise ValueError(f"the key of {tenant!r} needs sha256, 64 hexadecimal digits")
        found.append(ApiKey(tenant, digest.lower()))
    return tuple(found)


def key_of(tenant: str, secret: str) -> ApiKey:
    """Return what is kept of a key."""
    return ApiKey(tenant, hashlib.sha256(secret.encode()).hexdigest())


def _is_name(text: object) -> TypeGuard[str]:
    return isinstance(text, str) and text.isprintable() and 0 < len(text) <= 128


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text.lower()) <= set("0123456789abcdef")


def _named(raw: object, what: str, kind: type[T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for table in _tables(raw, what):
        terms = read_table(table, f"[[{what}]]", kind)
        if terms.name in found:
            raise ValueError(f"{terms.name!r} stands in [[{what}]] twice")
        found[terms.name] = terms
    return found


def _tables(raw: object, what: str) -> list[Mapping[str, Any]]:
    if not isinstance(raw, list) or not all(isinstance(table, dict) for table in raw):
        raise ValueError(f"{what} are tables: write [[{what}]]")
    return raw


def read_table(raw: object, where: str, kind: type[S]) -> S:
    """Read a table of the name `where`. Raises ValueError naming what is wrong in it."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where} is a table")
    known = kind.__struct_fields__
    for name in raw:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name!r} in {where} is no setting{hint}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        name = raw.get("name")
        raise ValueError(f"{where}{f' {name!r}' if name else ''}: {error}") from None
