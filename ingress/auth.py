"""Whose request this is. Rule: keys are known by their SHA-256 only, and never appear in a message.

A node without keys serves its own machine alone; there a browser page of another origin is refused,
by Host (DNS rebinding) and by Origin.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from headrace.settings import DEFAULT_TENANT
from headrace.sockets import is_loopback
from schemas.errors import Forbidden, InvalidApiKey

KEY_BYTES_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client."""

    tenant: str


class Gate:
    """Knows the keys. Without any, it lets in the machine's own clients as tenant `default`."""

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        """`keys` are pairs of tenant and SHA-256 (hexadecimal) of a key."""
        # Looking a digest up does not tell by its timing how much of a key was right.
        self._tenants = {bytes.fromhex(sha256): tenant for tenant, sha256 in keys}

    @property
    def keyless(self) -> bool:
        """Whether no key is configured."""
        return not self._tenants

    def identify(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller:
        """Return who sends these headers. Raises InvalidApiKey or Forbidden."""
        if self.keyless:
            _check_local(headers)
            return Caller(DEFAULT_TENANT)
        values = [value for name, value in headers if name == b"authorization"]
        if not values:
            raise InvalidApiKey("You didn't provide an API key: send 'Authorization: Bearer KEY'.")
        if len(values) > 1:
            raise InvalidApiKey("More than one Authorization header.")
        return self.identify_key(_bearer(values[0]))

    def identify_key(self, key: bytes) -> Caller:
        """Return whose key this is. Raises InvalidApiKey."""
        tenant = self._tenants.get(hashlib.sha256(key).digest())
        if tenant is None:
            raise InvalidApiKey("Incorrect API key provided.")
        return Caller(tenant)


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or not key:
        raise InvalidApiKey("The Authorization header must be 'Bearer KEY'.")
    if len(key) > KEY_BYTES_MAX or not key.isascii():
        raise InvalidApiKey("Incorrect API key provided.")
    return key


def _check_local(headers: Sequence[tuple[bytes, bytes]]) -> None:
    for name, value in headers:
        if name == b"host" and not is_local_origin("//" + value.decode("latin-1")):
            raise Forbidden("Without keys this node answers to local host names only.")
        if name == b"origin" and not is_local_origin(value.decode("latin-1")):
            raise Forbidden("Without keys this node answers pages of this machine only.")


def is_local_origin(origin: str) -> bool:
    """Tell whether a URL names this machine."""
    try:
        host = urlsplit(origin).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)
