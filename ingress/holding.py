"""What one node holds of requests that wait, and whom it still takes in. Pure.

In all it holds so many requests and bytes, whatever models they are for. Of that a tenant may hold
at most `SHARE` times what is left (dynamic thresholds; Choudhury and Hahne 1998): alone four
fifths, two that share it four ninths each. So who floods the node is refused while there is room
for others, and what becomes free is theirs first.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from schemas.tenant import PriorityClass

FILL_MAX: Final[dict[PriorityClass, float]] = {"interactive": 1.0, "standard": 0.9, "batch": 0.5}
"""Up to which part of the bounds a class may fill the node: low ones are held back early."""

SHARE: Final = 4
"""How many times what is left one tenant may hold."""


class Full(StrEnum):
    """Why a request is not queued."""

    TENANT = "tenant"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a node may hold in all: requests, and bytes of their prompts."""

    requests_max: int = 10_000
    bytes_max: int = 256 * 1024 * 1024


@dataclass(slots=True)
class Held:
    """Requests that wait, and the bytes of their prompts."""

    requests: int = 0
    prompt_bytes: int = 0


@dataclass(slots=True)
class Holding:
    """All that waits in a node, for whatever model, and what of it is whose."""

    bounds: Bounds = field(default_factory=Bounds)
    total: Held = field(default_factory=Held)
    tenants: dict[str, Held] = field(default_factory=dict)

    def full_for(
        self,
        tenant: str,
        priority_class: PriorityClass,
        *,
        prompt_bytes: int,
        tenant_max: int | None,
    ) -> Full | None:
        """Say which bound a request would break if it waited too; None if it may.

        `tenant_max` is how many of its tenant may wait, where its own terms say so.
        """
        own = self.tenants.get(tenant) or Held()
        if tenant_max is not None and own.requests >= tenant_max:
            return Full.TENANT
        fill = FILL_MAX[priority_class]
        requests_left = self.bounds.requests_max * fill - self.total.requests
        bytes_left = self.bounds.bytes_max * fill - self.total.prompt_bytes - prompt_bytes
        if requests_left <= 0 or own.requests >= SHARE * requests_left:
            return Full.QUEUE
        if bytes_left < 0 or own.prompt_bytes > SHARE * bytes_left:
            return Full.QUEUE
        return None

    def take(self, tenant: str, *, prompt_bytes: int) -> None:
        """Count one more that waits."""
        own = self.tenants.setdefault(tenant, Held())
        for held in (self.total, own):
            held.requests += 1
            held.prompt_bytes += prompt_bytes

    def release(self, tenant: str, *, prompt_bytes: int) -> None:
        """Count one less."""
        own = self.tenants[tenant]
        for held in (self.total, own):
            held.requests -= 1
            held.prompt_bytes -= prompt_bytes
        if not own.requests:
            del self.tenants[tenant]
