"""Whose request this is. Rule: keys are known by their SHA-256 only, and never appear in a message.

A client shows a key, a token or, through a trusted proxy, its certificate. A node without any of
these serves its own machine alone; there a browser page of another origin is refused, by Host (DNS
rebinding) and by Origin.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from headrace.settings import DEFAULT_TENANT, ApiKey
from headrace.sockets import is_local_origin, is_loopback
from headrace.tenants import Directory
from ingress.certificate import Certificates
from ingress.jwt import TOKEN_BYTES_MAX, BadToken, UnknownKey, Verifier
from schemas.admit import Caller
from schemas.errors import Forbidden, InvalidApiKey
from schemas.tenant import Policy

__all__ = ["Caller", "Gate", "is_loopback"]

KEY_BYTES_MAX: Final = 512

RawHeaders = Sequence[tuple[bytes, bytes]]


async def _never() -> bool:
    return False


class Gate:
    """Knows who may come in. Where nobody is configured, the machine's own clients may, as tenant
    `default`."""

    def __init__(
        self,
        keys: Iterable[tuple[str, str]] = (),
        *,
        directory: Directory | None = None,
        verifier: Verifier | None = None,
        certificates: Certificates | None = None,
        refresh: Callable[[], Awaitable[bool]] = _never,
        unknown_tenants: bool = True,
    ) -> None:
        """`keys` are pairs of tenant and SHA-256 (hexadecimal) of a key; a `directory` knows its
        own. `refresh` reads the tokens' keys anew; `unknown_tenants` says whether a token may name
        a tenant that the directory does not know.
        """
        known = (ApiKey(tenant, sha256) for tenant, sha256 in keys)
        self.directory = directory or Directory(known)
        self._verifier = verifier
        self._certificates = certificates
        self._refresh = refresh
        self._unknown_tenants = unknown_tenants

    @property
    def keyless(self) -> bool:
        """Whether nobody is configured."""
        return not self.directory.guarded

    async def recognise(self, headers: RawHeaders, *, peer: str | None = None) -> Caller:
        """As `identify`, and reads the tokens' keys anew where that may help."""
        try:
            return self.identify(headers, peer=peer)
        except InvalidApiKey as refusal:
            if not isinstance(refusal.__cause__, UnknownKey) or not await self._refresh():
                raise
        return self.identify(headers, peer=peer)

    async def recognise_key(self, key: bytes) -> Caller:
        """As `identify_key`, and reads the tokens' keys anew where that may help."""
        try:
            return self.identify_key(key)
        except InvalidApiKey as refusal:
            if not isinstance(refusal.__cause__, UnknownKey) or not await self._refresh():
                raise
        return self.identify_key(key)

    def identify(self, headers: RawHeaders, *, peer: str | None = None) -> Caller:
        """Return who sends these headers from the address `peer`. Raises InvalidApiKey, Forbidden.

        A key or token that is shown goes before a certificate.
        """
        if self.keyless:
            _check_local(headers)
            return Caller(DEFAULT_TENANT)
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) > 1:
            raise InvalidApiKey("More than one Authorization header.")
        if values:
            return self.identify_key(_bearer(values[0]))
        tenant = self._certified(headers, peer)
        if tenant is None:
            raise InvalidApiKey("You didn't provide an API key: send 'Authorization: Bearer KEY'.")
        if self.directory.is_gone(tenant, None):
            raise InvalidApiKey("The client certificate names no tenant.")
        return Caller(tenant)

    def shows_nothing(self, headers: RawHeaders, *, peer: str | None = None) -> bool:
        """Tell whether the headers name nobody, so that a key may still follow."""
        if any(name == b"authorization" for name, _ in headers):
            return False
        return self._certified(headers, peer) is None

    def _certified(self, headers: RawHeaders, peer: str | None) -> str | None:
        if self._certificates is None:
            return None
        return self._certificates.tenant(headers, peer)

    def identify_key(self, key: bytes) -> Caller:
        """Return whose key or token this is. Raises InvalidApiKey."""
        if len(key) <= KEY_BYTES_MAX:
            known = self.directory.find(hashlib.sha256(key).digest())
            if known is not None:
                return Caller(known.tenant, known.key)
        if self._verifier is None:
            raise InvalidApiKey("Incorrect API key provided.")
        try:
            claims = self._verifier.verify(key, now_s=time.time())
        except BadToken as error:
            raise InvalidApiKey("Incorrect API key provided.") from error
        admitted = self._unknown_tenants or self.directory.knows(claims.tenant)
        if not admitted or self.directory.is_gone(claims.tenant, None):
            raise InvalidApiKey("Incorrect API key provided.")
        return Caller(claims.tenant, until_s=claims.until_s)

    def check(self, caller: Caller) -> None:
        """Refuse a caller who was known once and is not any more. Raises InvalidApiKey."""
        expired = caller.until_s is not None and caller.until_s <= time.time()
        if expired or self.directory.is_gone(caller.tenant, caller.key):
            raise InvalidApiKey("The key or token is valid no more.")

    def policy(self, caller: Caller) -> Policy:
        """Return what a caller may do."""
        return self.directory.policy(caller.tenant)


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or not key:
        raise InvalidApiKey("The Authorization header must be 'Bearer KEY'.")
    if len(key) > TOKEN_BYTES_MAX or not key.isascii():
        raise InvalidApiKey("Incorrect API key provided.")
    return key


def _check_local(headers: RawHeaders) -> None:
    for name, value in headers:
        if name == b"host" and not is_local_origin("//" + value.decode("latin-1")):
            raise Forbidden("Without keys this node answers to local host names only.")
        if name == b"origin" and not is_local_origin(value.decode("latin-1")):
            raise Forbidden("Without keys this node answers pages of this machine only.")
