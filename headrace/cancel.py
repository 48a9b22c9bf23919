"""Cancelling a request wherever it stands. Rule: always purge and signal.

Deleting a message that runs succeeds and tells its worker nothing; a signal alone leaves a waiting
one in the queue.
"""

import asyncio
import contextlib
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused, Bus
from headrace.settle import settle_unrun
from schemas import subjects

AGAIN_S: Final = 2.0
"""How much later than who cancels a worker may find the broker that has just come back."""


async def cancel(bus: Bus, *, tenant: str, request: str, begun: bool = True) -> bool:
    """Take a request out of the queue and tell the workers; return whether it was in the system.

    `begun`: a worker may have it, and tells ingress what it has used; otherwise ingress is told
    here that it never ran, also where the broker has let it expire before. Raises BrokerAway and
    BrokerRefused.
    """
    purged = await bus.purge(
        subjects.REQUESTS, subjects.requests_of(tenant=tenant, request=request)
    )
    await bus.publish(subjects.cancel_signal(tenant, request), b"")
    if not begun:
        await settle_unrun(bus, tenant=tenant, request=request)
    return purged > 0


async def cancel_late(bus: Bus, *, tenant: str, request: str, begun: bool = True) -> None:
    """Cancel a request on the broker's return, when its worker may not be back to hear of it.
    Raises as `cancel`."""
    await cancel(bus, tenant=tenant, request=request, begun=begun)

    async def again() -> None:
        await asyncio.sleep(AGAIN_S)
        with contextlib.suppress(BrokerAway):
            await bus.publish(subjects.cancel_signal(tenant, request), b"")

    bus.errands.spawn(again(), name="cancel again")


async def cancel_surely(bus: Bus, *, tenant: str, request: str, begun: bool = True) -> None:
    """Cancel a request that nobody waits for; a broker that is away hears of it when it is back.

    Raises as `cancel`, to say so.
    """
    try:
        await cancel(bus, tenant=tenant, request=request, begun=begun)
    except (BrokerAway, BrokerRefused):

        async def later() -> None:
            await cancel_late(bus, tenant=tenant, request=request, begun=begun)

        bus.errands.owe(later)
        raise
