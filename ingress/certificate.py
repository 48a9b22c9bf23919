"""Who a client certificate names, as a trusted proxy passes it on. Rule: the header counts only
from the proxies' own addresses, and a subject that can be read in two ways names nobody.

Subjects are distinguished names in the form of RFC 4514 (nginx's `$ssl_client_s_dn`).
"""

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from headrace.tenant_settings import MtlsSettings
from schemas.errors import InvalidApiKey

SUBJECT_BYTES_MAX: Final = 1024
_ATTRIBUTE: Final = re.compile(r"\s*([A-Za-z0-9.-]+)\s*=((?:[^\\,+\"]|\\[^\n])*)(?:[,+]|\Z)")
_ESCAPE: Final = re.compile(r"\\(?:([0-9A-Fa-f]{2})|(.))")


class Certificates:
    """Reads the configured header."""

    def __init__(self, settings: MtlsSettings) -> None:
        self._header = settings.header.lower().encode("latin-1")
        self._networks = settings.networks
        self._subjects = settings.subjects

    def tenant(self, headers: Sequence[tuple[bytes, bytes]], peer: str | None) -> str | None:
        """Return the tenant that a proxy vouches for, None where it says nothing or is none.

        Raises InvalidApiKey for a subject that names no tenant.
        """
        values = [value for name, value in headers if name == self._header]
        if not values or not self._trusts(peer) or values == [b""]:
            return None
        subject = values[0].decode("latin-1")
        tenant = None
        if len(values) == 1 and len(subject) <= SUBJECT_BYTES_MAX and subject.isprintable():
            tenant = self._named(subject)
        if tenant is None:
            raise InvalidApiKey("The client certificate names no tenant.")
        return tenant

    def _trusts(self, peer: str | None) -> bool:
        try:
            address = ipaddress.ip_address(peer or "")
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def _named(self, subject: str) -> str | None:
        name = common_name(subject)
        if self._subjects is None:
            return name
        if name is not None and "=" not in name and name in self._subjects:
            return self._subjects[name]
        return self._subjects.get(subject)


def common_name(subject: str) -> str | None:
    """Return the one common name of a distinguished name, None without or with several."""
    names = []
    at = 0
    while at < len(subject):
        attribute = _ATTRIBUTE.match(subject, at)
        if attribute is None:
            return None
        if attribute[1].upper() in ("CN", "2.5.4.3"):
            names.append(attribute[2].strip())
        at = attribute.end()
    if len(names) != 1:
        return None
    try:
        # Escapes are bytes of UTF-8; what was read as Latin-1 is bytes too.
        name = _ESCAPE.sub(_unescaped, names[0]).encode("latin-1").decode()
    except ValueError:
        return None
    return name if 0 < len(name) <= 128 and name.isprintable() else None


def _unescaped(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16)) if escape[1] else escape[2]
