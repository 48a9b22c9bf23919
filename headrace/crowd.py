"""How many connections a process keeps, in all and of one address. Rule: this file decides and
never waits; who came in leaves once, however its connection ends.

A connection costs memory and a file before its client has said a word, so it is counted when it is
accepted, and refused without a look at what it sends.
"""

import ipaddress
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from schemas.errors import ConnectionsFull, Refusal, TooManyConnections

CONNECTIONS_MAX: Final = 20_000
NETWORK_BITS: Final = 64
"""A client of IPv6 has at least a network of this many bits to choose its addresses from."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many connections there may be: in all, and from one address (0: as many).

    `chosen` says that an operator named the first.
    """

    connections_max: int = CONNECTIONS_MAX
    per_address_max: int = 0
    chosen: bool = False


class Crowd:
    """Who is connected, by any hashable that stands for a connection."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._inside: dict[Hashable, str] = {}
        self._by_address: dict[str, int] = {}
        self._refused = {"all": 0, "address": 0}

    @property
    def connections(self) -> int:
        """How many are connected."""
        return len(self._inside)

    @property
    def addresses(self) -> int:
        """How many addresses they have; 0 where these are not counted."""
        return len(self._by_address)

    @property
    def refused(self) -> dict[str, int]:
        """How many were refused, by the bound that they were over: `all` or `address`."""
        return dict(self._refused)

    def enter(self, connection: Hashable, host: str | None) -> Refusal | None:
        """Let a connection in, or return why not."""
        bounds = self._bounds
        if len(self._inside) >= bounds.connections_max:
            self._refused["all"] += 1
            return ConnectionsFull(
                f"This node has {bounds.connections_max} connections open, as many as it takes.",
                retry_after_s=1,
            )
        address = _address(host) if bounds.per_address_max else ""
        if address:
            there = self._by_address.get(address, 0)
            if there >= bounds.per_address_max:
                self._refused["address"] += 1
                return TooManyConnections(
                    f"Your address has {there} connections open, as many as it may.",
                    retry_after_s=1,
                )
            self._by_address[address] = there + 1
        self._inside[connection] = address
        return None

    def leave(self, connection: Hashable) -> None:
        """Forget a connection; one that is not inside has no effect."""
        address = self._inside.pop(connection, "")
        if not address:
            return
        left = self._by_address[address] - 1
        if left:
            self._by_address[address] = left
        else:
            del self._by_address[address]


def _address(host: str | None) -> str:
    """Return what one client's connections have in common; empty where there is no address."""
    try:
        found = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, NETWORK_BITS), strict=False))
