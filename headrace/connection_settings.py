"""How many connections clients may keep open."""

from dataclasses import dataclass
from typing import Annotated

from headrace.crowd import CONNECTIONS_MAX, Bounds
from headrace.option import option

ConnectionsMax = Annotated[
    int | None,
    option(
        "connections-max",
        f"Client connections that a process keeps open; without it {CONNECTIONS_MAX}, or as many"
        " as its limit of open files holds.",
        min=1,
    ),
]
ConnectionsPerAddressMax = Annotated[
    int,
    option(
        "connections-per-address-max",
        "Of one client's address; 0 for as many. A proxy's clients share its address.",
        min=0,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """How many connections a front process keeps open."""

    connections_max: ConnectionsMax = None
    connections_per_address_max: ConnectionsPerAddressMax = 0

    @property
    def bounds(self) -> Bounds:
        """The same, for a turnstile."""
        return Bounds(
            connections_max=self.connections_max or CONNECTIONS_MAX,
            per_address_max=self.connections_per_address_max,
            chosen=self.connections_max is not None,
        )
