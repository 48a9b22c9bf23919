"""What a tenant has used of its limits. Rule: a reservation takes from all dimensions, or none.

Requests and tokens per minute are leaky buckets: what was used drains at the limit's rate, and a
request fits while what is used and its own cost are within one minute's worth (`burst` requests).
Open requests are counted by id, each until it is settled or has expired; so a settlement that comes
twice changes nothing, and a node that died leaks nothing. Pure: time is an argument.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from schemas.tenant import Policy

MINUTE_S: Final = 60.0

Dimension = Literal["requests", "tokens", "concurrent"]


class Limits(NamedTuple):
    """What a policy says about rates; None stands for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    burst: int | None = None
    concurrent_requests: int | None = None

    @staticmethod
    def of(policy: Policy) -> "Limits":
        """Return a policy's limits."""
        return Limits(
            policy.requests_per_minute,
            policy.tokens_per_minute,
            policy.burst,
            policy.concurrent_requests,
        )

    @property
    def none(self) -> bool:
        """Whether nothing is limited."""
        return (
            self.requests_per_minute is None
            and self.tokens_per_minute is None
            and self.concurrent_requests is None
        )

    @property
    def requests_max(self) -> int:
        """How many requests fit at once into the bucket of requests per minute."""
        return self.burst or self.requests_per_minute or 0


class Reservation(NamedTuple):
    """What an open request may use, and when it is open no more (seconds since the epoch)."""

    tokens: int
    expires_s: float


class Account(msgspec.Struct, array_like=True):
    """A tenant's use, as it is stored."""

    requests_used: float = 0.0
    tokens_used: float = 0.0
    updated_s: float = 0.0
    open: dict[str, Reservation] = msgspec.field(default_factory=dict)


class Exceeded(NamedTuple):
    """A request that does not fit: where, and in how many seconds it may; None for never."""

    dimension: Dimension
    retry_after_s: float | None


def explain(exceeded: Exceeded) -> str:
    """Return what its client is told."""
    what = {
        "requests": "requests per minute",
        "tokens": "tokens per minute",
        "concurrent": "concurrent requests",
    }[exceeded.dimension]
    if exceeded.retry_after_s is None:
        return f"The request is larger than your limit of {what}."
    return f"Your limit of {what} is reached."


class Standing(NamedTuple):
    """A bucket as its owner may see it: the limit per minute, what is left, and when it is full
    again (seconds)."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Standings:
    """A tenant's buckets, for the `x-ratelimit-*` headers; None without such a limit."""

    requests: Standing | None = None
    tokens: Standing | None = None


def advance(account: Account, limits: Limits, *, now_s: float) -> None:
    """Let pass what time has passed: uses drain. A clock that went back changes nothing.

    No bucket holds more than fits into it now: what was used under a higher limit would drain at
    the lower one's rate, for days.
    """
    passed_s = max(0.0, now_s - account.updated_s)
    account.updated_s = max(account.updated_s, now_s)
    requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
    account.requests_used = _drained(
        min(account.requests_used, limits.requests_max), requests, passed_s
    )
    account.tokens_used = _drained(min(account.tokens_used, tokens or 0), tokens, passed_s)


def forget_expired(account: Account, *, now_s: float) -> bool:
    """Drop the requests that are open no more; return whether there were any."""
    expired = [request for request, kept in account.open.items() if kept.expires_s <= now_s]
    for request in expired:
        del account.open[request]
    return bool(expired)


def reserve(
    account: Account,
    limits: Limits,
    *,
    request: str,
    tokens: int,
    expires_s: float,
) -> Exceeded | None:
    """Take a request's cost from an account that is up to date, or say where it does not fit.

    A request that is open already is not charged again.
    """
    if request in account.open:
        return None
    if (exceeded := exceeds(account, limits, tokens=tokens)) is not None:
        return exceeded
    if limits.requests_per_minute is not None:
        account.requests_used += 1
    if limits.tokens_per_minute is not None:
        account.tokens_used += tokens
    account.open[request] = Reservation(tokens, expires_s)
    return None


def settle(account: Account, *, request: str, tokens: int | None) -> bool:
    """Charge an open request what it has used and give the rest back; None: it never ran.

    Returns whether the request was open.
    """
    reserved = account.open.pop(request, None)
    if reserved is None:
        return False
    unused = reserved.tokens - min(reserved.tokens, tokens or 0)
    account.tokens_used = max(0.0, account.tokens_used - unused)
    if tokens is None:
        account.requests_used = max(0.0, account.requests_used - 1)
    return True


def standings_of(account: Account, limits: Limits) -> Standings:
    """Return both buckets."""
    return Standings(standing_of_requests(account, limits), standing_of_tokens(account, limits))


def standing_of_requests(account: Account, limits: Limits) -> Standing | None:
    """Return the bucket of requests; None without such a limit."""
    return _standing(account.requests_used, limits.requests_per_minute, limits.requests_max)


def standing_of_tokens(account: Account, limits: Limits) -> Standing | None:
    """Return the bucket of tokens; None without such a limit."""
    per_minute = limits.tokens_per_minute
    return _standing(account.tokens_used, per_minute, per_minute or 0)


def _standing(used: float, per_minute: int | None, capacity: int) -> Standing | None:
    if per_minute is None:
        return None
    reset_s = used / per_minute * MINUTE_S if per_minute else 0.0
    # A remainder of rounding must not hide the last request that fits.
    return Standing(per_minute, max(0, int(capacity - used + 1e-9)), reset_s)


def exceeds(account: Account, limits: Limits, *, tokens: int) -> Exceeded | None:
    """Say where one more request of so many tokens does not fit; None if it does."""
    if limits.concurrent_requests is not None and len(account.open) >= limits.concurrent_requests:
        return Exceeded("concurrent", 1.0 if limits.concurrent_requests else None)
    if (per_minute := limits.requests_per_minute) is not None:
        over = account.requests_used + 1 - limits.requests_max
        if over > _ROUNDING:
            return Exceeded("requests", _until(over, per_minute, fits=limits.requests_max >= 1))
    if (per_minute := limits.tokens_per_minute) is not None:
        over = account.tokens_used + tokens - per_minute
        if over > _ROUNDING:
            return Exceeded("tokens", _until(over, per_minute, fits=tokens <= per_minute))
    return None


_ROUNDING: Final = 1e-6
"""Of sums of small parts; a millionth of a token is nobody's."""


def _until(over: float, per_minute: int, *, fits: bool) -> float | None:
    return over / per_minute * MINUTE_S if fits and per_minute else None


def _drained(used: float, per_minute: int | None, passed_s: float) -> float:
    if per_minute is None:
        return 0.0
    return max(0.0, used - per_minute * passed_s / MINUTE_S)
