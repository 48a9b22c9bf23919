"""How much of its limits a tenant has left, in the headers that OpenAI names.

`x-ratelimit-limit-requests` is the figure per minute, `-remaining-` what fits now, `-reset-` the
time until all of it fits, as `250ms`, `1s` or `6m0s`. A dimension without limit has no header.
"""

import asyncio
import math
from typing import Final

from headrace.bus import BrokerAway, BrokerRefused
from ingress.limits import Standing, Standings
from ingress.line import Line

STANDINGS_S_MAX: Final = 0.5


async def ratelimit_headers(line: Line, tenant: str) -> dict[str, str]:
    """Return the headers of an answer for which nothing was reserved; none without broker, and
    none where it does not answer soon: no refusal waits for them."""
    try:
        async with asyncio.timeout(STANDINGS_S_MAX):
            return headers_of(await line.reservations.standings(tenant))
    except (BrokerAway, BrokerRefused, TimeoutError):
        return {}


def headers_of(standings: Standings) -> dict[str, str]:
    """Return the headers of a tenant's buckets."""
    headers: dict[str, str] = {}
    for name, standing in (("requests", standings.requests), ("tokens", standings.tokens)):
        if standing is not None:
            headers |= _headers(name, standing)
    return headers


def _headers(name: str, standing: Standing) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(standing.limit),
        f"x-ratelimit-remaining-{name}": str(standing.remaining),
        f"x-ratelimit-reset-{name}": duration(standing.reset_s),
    }


def duration(seconds: float) -> str:
    """Return a time as Go writes it, rounded up: milliseconds below a second, seconds above."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    whole = math.ceil(milliseconds / 1000)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
